// The kernels against the plain forms, on a GPU. A program of its own (ops_cuda_test): without a GPU it says so and ends with
// ctest's code for a skipped test.
#include "ops/cuda.h"
#include "ops/op_cases.h"
#include "ops/torch.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cstdio>

namespace gemtune {
namespace {

const at::Device kGpu(at::kCUDA, 0);

TEST(Cuda, EveryOperationAgreesWithItsPlainForm) {
  for (const OpCase& op_case : op_cases()) {
    for (const OpError& error : compare(op_case)) {
      EXPECT_TRUE(error.holds()) << op_case.name << ", " << error.what << ": " << error.fused << ", plain bf16 " << error.plain;
    }
  }
}

TEST(Cuda, Nf4IsBitEqualToThePlainForm) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Tensor weight = (at::randn({96, 200}) * 0.05).to(dtype);  // 300 blocks that cross rows
    weight[3].zero_();
    const Nf4Tensor cpu = nf4_quantize(weight, false);
    const Nf4Tensor gpu = nf4_quantize(weight.to(kGpu), false);
    EXPECT_TRUE(at::equal(cpu.codes, gpu.codes.cpu()));
    EXPECT_TRUE(at::equal(cpu.absmax, gpu.absmax.cpu()));
    EXPECT_TRUE(at::equal(nf4_dequantize(cpu, at::kFloat), nf4_dequantize(gpu, at::kFloat).cpu()));
    EXPECT_TRUE(at::equal(nf4_dequantize(cpu, at::kBFloat16), nf4_dequantize(gpu, at::kBFloat16).cpu()));

    // The mean that absmax is centred by may differ in its last bit between devices: carried over for the comparison.
    const Nf4Tensor nested = nf4_quantize(weight.to(kGpu), true);
    const Nf4Tensor on_cpu = to_device(nested, at::kCPU);
    EXPECT_TRUE(at::equal(nf4_dequantize(on_cpu, at::kFloat), nf4_dequantize(nested, at::kFloat).cpu()));
    const Nf4Tensor plain = nf4_quantize(weight, true);
    EXPECT_NEAR(plain.offset, nested.offset, 3e-7 * std::fabs(plain.offset));
    if (plain.offset == nested.offset) {
      EXPECT_TRUE(at::equal(plain.absmax_codes, on_cpu.absmax_codes));
      EXPECT_TRUE(at::equal(plain.absmax2, on_cpu.absmax2));
    }
  }
}

TEST(Cuda, DropoutDrawsTheMaskOfTheCpu) {
  const Tensor ones = at::ones({3, 50, 72});
  const DropoutKey key{0x123456789ABCDEFu, 0xFEDCBA987u, 77};
  EXPECT_TRUE(at::equal(dropout(ones, 0.05, key), dropout(ones.to(kGpu), 0.05, key).cpu()));
}

TEST(Cuda, AdamwFollowsThePlainForm) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Tensor weight = at::randn({1000}).to(dtype);
    const Tensor gpu = weight.to(kGpu);
    const Tensor cpu = weight.clone();
    std::vector<Tensor> moments = {at::zeros_like(cpu), at::zeros_like(cpu), at::zeros_like(gpu), at::zeros_like(gpu)};
    for (int64_t step = 1; step <= 5; ++step) {
      const Tensor gradient = at::randn({1000}).to(dtype);
      const AdamwArguments arguments{.learning_rate = 0.01, .weight_decay = 0.1, .step = step, .gradient_scale = 0.37};
      adamw_({{cpu, gradient.clone(), moments[0], moments[1]}}, arguments);
      adamw_({{gpu, gradient.to(kGpu), moments[2], moments[3]}}, arguments);
    }
    const double bound = dtype == at::kFloat ? 1e-5 : 0.02;
    EXPECT_LT((cpu.to(at::kFloat) - gpu.cpu().to(at::kFloat)).abs().max().item<double>(), bound);
  }
}

}  // namespace
}  // namespace gemtune

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;
  testing::InitGoogleTest(&argc, argv);
  if (!gemtune::why_no_cuda().empty()) {
    std::printf("not run: %s\n", gemtune::why_no_cuda().c_str());
    return kSkipped;
  }
  return RUN_ALL_TESTS();
}
