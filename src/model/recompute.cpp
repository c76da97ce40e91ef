#include "model/model.h"
#include "ops/torch.h"

#include <ATen/core/ivalue.h>

namespace gemtune {
namespace {

// The block to run again, kept by the graph node.
struct Block : torch::CustomClassHolder {
  explicit Block(std::function<Tensor(const Tensor&)> f) : run(std::move(f)) {}
  std::function<Tensor(const Tensor&)> run;
};

// The trained tensors are inputs of the function, so that their gradients are returned like any other.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static Tensor forward(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Block>& block, const Tensor& x,
                        at::TensorList trained) {
    torch::autograd::variable_list saved = {x};
    saved.insert(saved.end(), trained.begin(), trained.end());
    context->save_for_backward(saved);
    context->saved_data["block"] = at::IValue::make_capsule(block);
    const at::NoGradGuard no_grad;
    return block->run(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode with_grad(true);
    const Tensor x = saved[0].detach().requires_grad_(saved[0].requires_grad());
    const Tensor y = static_cast<Block*>(context->saved_data["block"].toCapsule().get())->run(x);
    torch::autograd::variable_list inputs(saved.begin() + 1, saved.end());
    if (x.requires_grad()) inputs.insert(inputs.begin(), x);
    auto found =
        torch::autograd::grad({y}, inputs, {gradients[0]}, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
    if (!x.requires_grad()) found.insert(found.begin(), Tensor());
    found.insert(found.begin(), Tensor());  // the block itself
    return found;
  }
};

}  // namespace

Tensor recompute(const std::function<Tensor(const Tensor&)>& block, const Tensor& x, const std::vector<Tensor>& trained) {
  if (!at::GradMode::is_enabled() || (!x.requires_grad() && trained.empty())) return block(x);
  return Recomputed::apply(c10::make_intrusive<Block>(block), x, at::TensorList(trained));
}

}  // namespace gemtune
