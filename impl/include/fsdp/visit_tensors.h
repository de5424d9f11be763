#pragma once
// Visiting the tensors in arguments and results: tensors, and vectors, arrays, optionals, pairs and
// tuples of visitable things. For a struct of your own, define `template <typename F> void
// visit_tensors(YourStruct&, F&&)` in its namespace.

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp {

template <typename F>
void visit_tensors(at::Tensor& tensor, F&& f) {
  f(tensor);
}
template <typename T, typename F>
requires(std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_pointer_v<T> ||
         std::is_null_pointer_v<T> || std::same_as<T, std::string> ||
         std::same_as<T, std::nullopt_t>) void visit_tensors(T&, F&&) {}
template <typename T, typename F>
void visit_tensors(std::vector<T>& values, F&& f);
template <typename T, std::size_t N, typename F>
void visit_tensors(std::array<T, N>& values, F&& f);
template <typename T, typename F>
void visit_tensors(std::optional<T>& value, F&& f);
template <typename A, typename B, typename F>
void visit_tensors(std::pair<A, B>& values, F&& f);
template <typename... Ts, typename F>
void visit_tensors(std::tuple<Ts...>& values, F&& f);

template <typename T, typename F>
void visit_tensors(std::vector<T>& values, F&& f) {
  for (auto& value : values) {
    visit_tensors(value, f);
  }
}
template <typename T, std::size_t N, typename F>
void visit_tensors(std::array<T, N>& values, F&& f) {
  for (auto& value : values) {
    visit_tensors(value, f);
  }
}
template <typename T, typename F>
void visit_tensors(std::optional<T>& value, F&& f) {
  if (value) {
    visit_tensors(*value, f);
  }
}
template <typename A, typename B, typename F>
void visit_tensors(std::pair<A, B>& values, F&& f) {
  visit_tensors(values.first, f);
  visit_tensors(values.second, f);
}
template <typename... Ts, typename F>
void visit_tensors(std::tuple<Ts...>& values, F&& f) {
  std::apply([&f](auto&... each) { (visit_tensors(each, f), ...); }, values);
}

/// Pointers to the defined tensors in `value`, in order.
template <typename T>
std::vector<at::Tensor*> tensors_in(T& value) {
  std::vector<at::Tensor*> found;
  visit_tensors(value, [&found](at::Tensor& tensor) {
    if (tensor.defined()) {
      found.push_back(&tensor);
    }
  });
  return found;
}

}  // namespace fsdp
