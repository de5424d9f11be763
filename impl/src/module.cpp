#include "fsdp/module.h"

#include <algorithm>
#include <string_view>

namespace fsdp {
namespace detail {

void run_pre_forward(torch::nn::Module& module, const HookableModule& hookable, HookRange range,
                     const std::vector<at::Tensor*>& inputs, std::size_t& entered) {
  for (auto i = range.begin; i < range.end; ++i) {
    ++entered;
    hookable.forward_hooks()[i]->pre_forward(module, inputs);
  }
}

void run_post_forward(torch::nn::Module& module, const HookableModule& hookable, HookRange range,
                      const std::vector<at::Tensor*>& outputs) {
  for (auto i = range.end; i > range.begin; --i) {
    hookable.forward_hooks()[i - 1]->post_forward(module, outputs);
  }
}

void tell_failed(torch::nn::Module& module, const HookableModule& hookable, std::size_t begin,
                 std::size_t entered) noexcept {
  while (entered > begin) {
    hookable.forward_hooks()[--entered]->forward_failed(module);
  }
}

}  // namespace detail

std::string plain_name(const std::string& name) {
  // Component by component, so that a name that merely contains the wrapper's is left alone.
  std::string plain;
  std::size_t begin = 0;
  while (begin <= name.size()) {
    const auto end = std::min(name.find('.', begin), name.size());
    const auto component = std::string_view(name).substr(begin, end - begin);
    if (component != kWrappedModuleName && !component.empty()) {
      if (!plain.empty()) {
        plain += '.';
      }
      plain += component;
    }
    begin = end + 1;
  }
  return plain;
}

}  // namespace fsdp
