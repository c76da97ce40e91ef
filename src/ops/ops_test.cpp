#include "ops/ops.h"

#include "ops/torch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace gemtune {
namespace {

Tensor row(std::vector<float> values) {
  return at::from_blob(values.data(), {int64_t(values.size())}, at::kFloat).clone();
}

// max|a − b| ÷ max|b|
double relative_error(const Tensor& a, const Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>() /
         std::max(1e-30, b.to(at::kDouble).abs().max().item<double>());
}

// 64 values whose absmax is 1, so that a value's code is that of itself.
Tensor block_with(const std::vector<float>& values) {
  Tensor block = at::zeros({1, 64});
  float* to = block.mutable_data_ptr<float>();
  std::copy(values.begin(), values.end(), to);
  to[63] = 1.0f;
  return block;
}

TEST(Nf4, EvenElementsLieInTheHighNibble) {
  const Nf4Tensor quantised = nf4_quantize(block_with({0.9f, -0.2f}), false);
  EXPECT_EQ(quantised.codes.const_data_ptr<uint8_t>()[0], 0xF5);
}

TEST(Nf4, ThresholdsAreStrict) {
  const Nf4Tensor quantised = nf4_quantize(block_with({0.03979014977812767f, 0.0397902f}), false);
  EXPECT_EQ(quantised.codes.const_data_ptr<uint8_t>()[0], 0x78);
}

TEST(Nf4, EveryCodeComesBackAsItsValue) {
  const Tensor values = nf4_values();
  Tensor block = at::zeros({1, 64});
  block.narrow(1, 0, 16).copy_(values.unsqueeze(0));
  const Tensor back = nf4_dequantize(nf4_quantize(block * 3.5, false), at::kFloat);
  EXPECT_TRUE(at::equal(back.narrow(1, 0, 16), (values * 3.5).unsqueeze(0)));
}

TEST(Nf4, AnAllZeroBlockStaysZero) {
  for (const bool double_quant : {false, true}) {
    const Tensor zeros = at::zeros({2, 64});
    EXPECT_TRUE(at::equal(nf4_dequantize(nf4_quantize(zeros, double_quant), at::kFloat).abs(), zeros));
  }
}

TEST(Nf4, BlocksMayCrossRows) {
  const Tensor weight = at::randn({6, 48});  // 288 elements: four and a half blocks
  const Nf4Tensor quantised = nf4_quantize(weight, false);
  EXPECT_EQ(quantised.absmax.numel(), 5);
  EXPECT_FLOAT_EQ(quantised.absmax.const_data_ptr<float>()[0], weight.flatten().narrow(0, 0, 64).abs().max().item<float>());
  EXPECT_FLOAT_EQ(quantised.absmax.const_data_ptr<float>()[4], weight.flatten().narrow(0, 256, 32).abs().max().item<float>());
  EXPECT_LT(relative_error(nf4_dequantize(quantised, at::kFloat), weight), 0.16);
}

TEST(Nf4, TheDynamicMapHasBitsandbytesValues) {
  const Tensor map = nf4_dynamic_map();
  const float* values = map.const_data_ptr<float>();
  ASSERT_EQ(map.numel(), 256);
  EXPECT_FLOAT_EQ(values[0], -0.99296875f);
  EXPECT_FLOAT_EQ(values[63], -0.10703125f);
  EXPECT_FLOAT_EQ(values[126], -5.5e-7f);
  EXPECT_EQ(values[127], 0.0f);
  EXPECT_FLOAT_EQ(values[128], 5.5e-7f);
  EXPECT_FLOAT_EQ(values[160], 0.01421875f);
  EXPECT_FLOAT_EQ(values[192], 0.12109375f);
  EXPECT_EQ(values[255], 1.0f);
}

TEST(Nf4, ValuesAreRoundedToTheWeightsDtype) {
  const Tensor weight = at::randn({4, 64}).to(at::kBFloat16);
  const Tensor back = nf4_dequantize(nf4_quantize(weight, true), at::kFloat);
  EXPECT_TRUE(at::equal(back, back.to(at::kBFloat16).to(at::kFloat)));
}

TEST(RmsNorm, MultipliesByOnePlusTheWeightInFp32) {
  const Tensor x = at::randn({3, 8}).to(at::kBFloat16);
  const Tensor weight = at::randn({8});
  const Tensor x32 = x.to(at::kFloat);
  const Tensor expected = (x32 / (x32.square().mean(-1, true) + 1e-6).sqrt() * (1 + weight)).to(at::kBFloat16);
  EXPECT_LT(relative_error(rms_norm_one_plus(x, weight, 1e-6), expected), 1e-2);
  EXPECT_EQ(rms_norm_one_plus(x, weight, 1e-6).scalar_type(), at::kBFloat16);
}

TEST(Rope, TablesHaveTheReferencesValuesAtPosition100) {
  const auto value = [](const Tensor& table, int64_t k) { return table.to(at::kFloat).const_data_ptr<float>()[k]; };
  const RopeTable local = make_rope_table(100, 1, 256, 1e4, 1, at::kBFloat16, at::kCPU);
  EXPECT_EQ(value(local.cos_TE, 0), 0.86328125f);
  EXPECT_EQ(value(local.sin_TE, 1), -0.9296875f);
  EXPECT_EQ(value(local.sin_TE, 64), 0.83984375f);
  EXPECT_EQ(value(local.sin_TE, 127 + 128), 0.0107421875f);
  const RopeTable global = make_rope_table(100, 1, 256, 1e6, 8, at::kBFloat16, at::kCPU);
  EXPECT_EQ(value(global.sin_TE, 0), -0.06640625f);
  EXPECT_EQ(value(global.cos_TE, 1), 0.2236328125f);
  EXPECT_EQ(value(global.sin_TE, 64), 0.01251220703125f);
}

TEST(Rope, RotatesHalvesNotPairs) {
  const RopeTable rope = make_rope_table(1, 1, 4, 1e4, 1, at::kFloat, at::kCPU);
  const Tensor x = row({1, 2, 3, 4}).reshape({1, 1, 1, 4});
  const Tensor normed = rms_norm_one_plus(x, at::zeros({4}), 0);
  const Tensor out = qk_norm_rope(x, at::zeros({4}), 0, rope);
  const float* n = normed.const_data_ptr<float>();
  EXPECT_NEAR(out.const_data_ptr<float>()[0], n[0] * std::cos(1.0) - n[2] * std::sin(1.0), 1e-6);
  EXPECT_NEAR(out.const_data_ptr<float>()[2], n[2] * std::cos(1.0) + n[0] * std::sin(1.0), 1e-6);
}

TEST(Attention, QueryHeadsShareKeyHeadsInOrder) {
  const Tensor q = at::randn({1, 4, 3, 8});
  const Tensor k = at::randn({1, 2, 5, 8});
  const Tensor v = at::randn({1, 2, 5, 8});
  const Tensor out = attention(q, k, v, Tensor(), 0.3).reshape({3, 4, 8});
  for (int64_t head = 0; head < 4; ++head) {
    const Tensor scores = at::matmul(q[0][head], k[0][head / 2].t()) * 0.3;
    const Tensor expected = at::matmul(scores.softmax(-1), v[0][head / 2]);
    EXPECT_LT(relative_error(out.select(1, head), expected), 1e-5) << head;
  }
}

TEST(Dropout, KeepsTheGivenShareAndScalesIt) {
  const Tensor x = at::ones({400, 1000});
  const Tensor out = dropout(x, 0.1, {42, 7, 3});
  EXPECT_NEAR((out == 0).to(at::kDouble).mean().item<double>(), 0.1, 0.002);
  EXPECT_NEAR(out.max().item<float>(), 1 / 0.9, 2e-5);  // p in steps of 2⁻¹⁵
}

TEST(Dropout, IsAFunctionOfItsKeyAlone) {
  const Tensor x = at::ones({50, 64});
  const auto differ = [&](const DropoutKey& key) { return !at::equal(dropout(x, 0.5, {1, 2, 3}), dropout(x, 0.5, key)); };
  EXPECT_FALSE(differ({1, 2, 3}));
  EXPECT_TRUE(differ({9, 2, 3}));
  EXPECT_TRUE(differ({1, 9, 3}));
  EXPECT_TRUE(differ({1, 2, 9}));
}

TEST(Dropout, GradientUsesTheSameMask) {
  const Tensor x = at::ones({8, 64}).requires_grad_(true);
  const Tensor out = dropout(x, 0.5, {1, 2, 3});
  out.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), out.detach()));
}

TEST(LoraLinear, AddsTheScaledProductAndPassesGradients) {
  const Tensor x = at::randn({5, 64}).requires_grad_(true);
  LoraArguments lora;
  lora.a_RI = at::randn({4, 64}).requires_grad_(true);
  lora.b_OR = at::randn({32, 4}).requires_grad_(true);
  lora.scale = 0.5;
  const Tensor dense = at::randn({32, 64});
  const Tensor bias = at::randn({32});
  const Tensor expected = at::linear(x, dense + 0.5 * at::matmul(lora.b_OR, lora.a_RI), bias);
  const Tensor out = lora_linears(x, {{{dense, std::nullopt}, bias, lora}}, {}, Tensor())[0];
  EXPECT_LT(relative_error(out, expected), 1e-5);
  const Tensor seed = at::randn({5, 32});
  const auto ours = torch::autograd::grad({out}, {x, lora.a_RI, lora.b_OR}, {seed});
  const auto theirs = torch::autograd::grad({expected}, {x, lora.a_RI, lora.b_OR}, {seed});
  for (size_t i = 0; i < 3; ++i) EXPECT_LT(relative_error(ours[i], theirs[i]), 1e-5) << i;
}

TEST(LoraLinear, AnNf4WeightActsAsItsExpansion) {
  const Tensor x = at::randn({5, 64}).requires_grad_(true);
  const Nf4Tensor nf4 = nf4_quantize(at::randn({32, 64}), true);
  const Tensor dense = nf4_dequantize(nf4, at::kFloat);
  const Tensor packed = lora_linears(x, {{{Tensor(), nf4}, Tensor(), std::nullopt}}, {}, Tensor())[0];
  const Tensor resident = lora_linears(x, {{{dense, nf4}, Tensor(), std::nullopt}}, {}, Tensor())[0];
  EXPECT_TRUE(at::equal(packed, resident));
  const Tensor seed = at::randn({5, 32});
  EXPECT_LT(relative_error(torch::autograd::grad({packed}, {x}, {seed})[0], torch::autograd::grad({resident}, {x}, {seed})[0]),
            1e-6);
}

void expect_cross_entropy_equals_dense(int64_t rows, int64_t vocabulary, double softcap) {
  // Logits of about ±1, as a model's are: a peaked softmax would cancel to rounding noise.
  const Tensor hidden = (at::randn({rows, 16}) * 0.25).requires_grad_(true);
  const Tensor weight = at::randn({vocabulary, 16}).requires_grad_(true);
  const Tensor targets = at::randint(vocabulary, {rows}, at::kLong);
  const CrossEntropySum sum = linear_cross_entropy(hidden, weight, targets, softcap);
  Tensor logits = at::matmul(hidden, weight.t());
  if (softcap > 0) logits = (logits / softcap).tanh() * softcap;
  const Tensor dense = -at::log_softmax(logits, -1).gather(1, targets.unsqueeze(1)).sum();
  EXPECT_NEAR(sum.loss_sum.item<double>(), dense.item<double>(), 1e-4 * dense.item<double>());
  EXPECT_EQ(sum.num_correct.item<int64_t>(), (logits.argmax(-1) == targets).sum().item<int64_t>());
  const auto ours = torch::autograd::grad({sum.loss_sum / 3}, {hidden, weight});
  const auto theirs = torch::autograd::grad({dense / 3}, {hidden, weight});
  EXPECT_LT(relative_error(ours[0], theirs[0]), 1e-4);
  EXPECT_LT(relative_error(ours[1], theirs[1]), 1e-4);
}

TEST(LinearCrossEntropy, EqualsTheDenseLossInOneChunk) {
  expect_cross_entropy_equals_dense(37, 101, 0);
}
TEST(LinearCrossEntropy, EqualsTheDenseLossInSeveralChunks) {
  expect_cross_entropy_equals_dense(70, 600000, 0);
}
TEST(LinearCrossEntropy, AppliesTheSoftCap) {
  expect_cross_entropy_equals_dense(37, 101, 5);
}

TEST(LinearCrossEntropy, UniformLogitsGiveTheLogarithmOfTheVocabulary) {
  const CrossEntropySum sum = linear_cross_entropy(at::zeros({1, 4}), at::zeros({262208, 4}), at::zeros({1}, at::kLong), 0);
  EXPECT_NEAR(sum.loss_sum.item<double>(), 12.476893, 1e-5);
}

TEST(Adamw, FollowsThePublishedUpdate) {
  const Tensor weight = row({1.0f, -2.0f});
  const Tensor m = at::zeros({2});
  const Tensor v = at::zeros({2});
  double w = 1, first = 0, second = 0;
  for (int step = 1; step <= 5; ++step) {
    const double g = 0.1 * step;
    adamw_({{weight, row({float(g), -0.3f}), m, v}}, {.learning_rate = 0.01, .weight_decay = 0.1, .step = step});
    w *= 1 - 0.01 * 0.1;
    first = 0.9 * first + 0.1 * g;
    second = 0.999 * second + 0.001 * g * g;
    w -= 0.01 * (first / (1 - std::pow(0.9, step))) / (std::sqrt(second / (1 - std::pow(0.999, step))) + 1e-8);
  }
  EXPECT_NEAR(weight.const_data_ptr<float>()[0], w, 1e-6);
}

TEST(Adamw, Bf16TensorsAreUpdatedInFp32AndRounded) {
  const Tensor weight = row({1.0f}).to(at::kBFloat16);
  const Tensor m = at::zeros({1}, at::kBFloat16);
  const Tensor v = at::zeros({1}, at::kBFloat16);
  adamw_({{weight, row({1.0f}).to(at::kBFloat16), m, v}}, {.learning_rate = 1e-4});
  EXPECT_EQ(weight.to(at::kFloat).item<float>(), 1.0f);  // below half a unit in the last place
  adamw_({{weight, row({1.0f}).to(at::kBFloat16), m, v}}, {.learning_rate = 0.1, .step = 2});
  EXPECT_NEAR(weight.to(at::kFloat).item<float>(), 0.9, 0.005);
}

}  // namespace
}  // namespace gemtune
