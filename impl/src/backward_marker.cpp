#include "backward_marker.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace fsdp {
namespace {

class MarkerNode : public torch::autograd::Node {
 public:
  MarkerNode(torch::autograd::edge_list&& next_edges, std::function<void()> on_backward)
      : Node(std::move(next_edges)), on_backward_(std::move(on_backward)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    on_backward_();
    return std::move(gradients);
  }
  std::string name() const override { return "fsdp::MarkerNode"; }

 private:
  std::function<void()> on_backward_;
};

}  // namespace

bool mark_backward(const std::vector<at::Tensor*>& tensors, std::function<void()> on_backward) {
  if (!at::GradMode::is_enabled()) {
    return false;
  }
  torch::autograd::edge_list edges;
  std::vector<at::Tensor*> marked;
  for (auto* tensor : tensors) {
    if (tensor->requires_grad()) {
      edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
      marked.push_back(tensor);
    }
  }
  if (marked.empty()) {
    return false;
  }
  auto node = std::make_shared<MarkerNode>(std::move(edges), std::move(on_backward));
  for (auto* tensor : marked) {
    auto same = tensor->detach();
    torch::autograd::create_gradient_edge(same, node);
    *tensor = std::move(same);
  }
  return true;
}

void at_end_of_backward(std::function<void()> function) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(function));
}

}  // namespace fsdp
