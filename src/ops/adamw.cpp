#include "base/error.h"
#include "ops/cuda.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <c10/util/BFloat16.h>

#include <map>

namespace gemtune {
namespace {

AdamwScalars scalars_of(const AdamwArguments& a) {
  AdamwScalars s;
  s.beta1 = float(a.beta1);
  s.beta2 = float(a.beta2);
  s.keep = float(1.0 - a.learning_rate * a.weight_decay);
  s.step_size = float(a.learning_rate / (1.0 - std::pow(a.beta1, double(a.step))));
  s.root_correction = float(std::sqrt(1.0 - std::pow(a.beta2, double(a.step))));
  s.eps = float(a.eps);
  s.gradient_scale = float(a.gradient_scale);
  return s;
}

// One pass over the four arrays; the arithmetic is fp32 whatever the storage.
template <class T>
void update(const AdamwTensors& tensors, const AdamwScalars& s) {
  T* w = tensors.weight.mutable_data_ptr<T>();
  const T* g = tensors.gradient.const_data_ptr<T>();
  T* m = tensors.moment1.mutable_data_ptr<T>();
  T* v = tensors.moment2.mutable_data_ptr<T>();
  at::parallel_for(0, tensors.weight.numel(), 8192, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // numerics: the clipped gradient is rounded to its own dtype first, as clipping in place does.
      const float grad = float(T(float(g[i]) * s.gradient_scale));
      const float first = float(m[i]) + (grad - float(m[i])) * (1.0f - s.beta1);
      const float second = float(v[i]) * s.beta2 + grad * grad * (1.0f - s.beta2);
      const float denominator = std::sqrt(second) / s.root_correction + s.eps;
      w[i] = T(float(w[i]) * s.keep - s.step_size * first / denominator);
      m[i] = T(first);
      v[i] = T(second);
    }
  });
}

}  // namespace

void adamw_(const std::vector<AdamwTensors>& tensors, const AdamwArguments& arguments) {
  const AdamwScalars scalars = scalars_of(arguments);
  std::map<at::ScalarType, std::vector<AdamwEntry>> on_cuda;
  for (const AdamwTensors& t : tensors) {
    for (const Tensor* tensor : {&t.gradient, &t.moment1, &t.moment2}) {
      if (tensor->scalar_type() != t.weight.scalar_type() || tensor->sizes() != t.weight.sizes() || !tensor->is_contiguous()) {
        throw job_error("adamw_: weight, gradient and moments must be contiguous and of one shape and dtype");
      }
    }
    const at::ScalarType dtype = t.weight.scalar_type();
    if (dtype != at::kFloat && dtype != at::kBFloat16) {
      throw job_error("adamw_: dtype {} is neither float32 nor bfloat16", c10::toString(dtype));
    }
    if (t.weight.is_cuda()) {
      on_cuda[dtype].push_back({t.weight.mutable_data_ptr(), t.gradient.const_data_ptr(), t.moment1.mutable_data_ptr(),
                                t.moment2.mutable_data_ptr(), t.weight.numel()});
    } else if (dtype == at::kFloat) {
      update<float>(t, scalars);
    } else {
      update<c10::BFloat16>(t, scalars);
    }
  }
  for (const auto& [dtype, entries] : on_cuda) {
    kernels().adamw(entries.data(), int(entries.size()), dtype == at::kFloat, scalars, stream_of(tensors[0].weight));
  }
}

}  // namespace gemtune
