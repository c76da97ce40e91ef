#include "base/error.h"
#include "ops/ops.h"
#include "ops/torch.h"

#include <c10/util/BFloat16.h>

namespace gemtune {
namespace {

// One pass over the four arrays; the arithmetic is fp32 whatever the storage.
template <class T>
void update(const Tensor& weight, const Tensor& gradient, const Tensor& moment1, const Tensor& moment2, const AdamwArguments& a) {
  T* w = weight.mutable_data_ptr<T>();
  const T* g = gradient.const_data_ptr<T>();
  T* m = moment1.mutable_data_ptr<T>();
  T* v = moment2.mutable_data_ptr<T>();
  const float beta1 = float(a.beta1);
  const float beta2 = float(a.beta2);
  const float keep = float(1.0 - a.learning_rate * a.weight_decay);
  const float step_size = float(a.learning_rate / (1.0 - std::pow(a.beta1, double(a.step))));
  const float root_correction = float(std::sqrt(1.0 - std::pow(a.beta2, double(a.step))));
  const float eps = float(a.eps);
  const float gradient_scale = float(a.gradient_scale);
  at::parallel_for(0, weight.numel(), 8192, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // numerics: the clipped gradient is rounded to its own dtype first, as clipping in place does.
      const float grad = float(T(float(g[i]) * gradient_scale));
      const float first = float(m[i]) + (grad - float(m[i])) * (1.0f - beta1);
      const float second = float(v[i]) * beta2 + grad * grad * (1.0f - beta2);
      const float denominator = std::sqrt(second) / root_correction + eps;
      w[i] = T(float(w[i]) * keep - step_size * first / denominator);
      m[i] = T(first);
      v[i] = T(second);
    }
  });
}

}  // namespace

void adamw_(const Tensor& weight, const Tensor& gradient, const Tensor& moment1, const Tensor& moment2,
            const AdamwArguments& arguments) {
  for (const Tensor* tensor : {&gradient, &moment1, &moment2}) {
    if (tensor->scalar_type() != weight.scalar_type() || tensor->sizes() != weight.sizes() || !tensor->is_contiguous()) {
      throw job_error("adamw_: weight, gradient and moments must be contiguous and of one shape and dtype");
    }
  }
  if (weight.scalar_type() == at::kFloat) return update<float>(weight, gradient, moment1, moment2, arguments);
  if (weight.scalar_type() == at::kBFloat16) return update<c10::BFloat16>(weight, gradient, moment1, moment2, arguments);
  throw job_error("adamw_: dtype {} is neither float32 nor bfloat16", c10::toString(weight.scalar_type()));
}

}  // namespace gemtune
