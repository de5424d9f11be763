#include "tensor_source.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "fsdp/errors.h"

namespace fsdp {
namespace {

using nlohmann::json;

std::map<std::string, TensorInfo> infos_of(const StateDict& state, const std::string& origin) {
  std::map<std::string, TensorInfo> infos;
  for (const auto& [name, tensor] : state) {
    if (!tensor.defined() || tensor.layout() != at::kStrided) {
      throw StateError(fmt::format("{}: '{}' is {}; wanted: a dense tensor", origin, name,
                                   tensor.defined() ? "not dense" : "undefined"));
    }
    infos[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  }
  return infos;
}

at::Tensor flat_range(const at::Tensor& whole, std::int64_t begin, std::int64_t numel) {
  return whole.detach().reshape({-1}).narrow(0, begin, numel);
}

void check_fit(const ModelTensor& tensor, const std::string& name, const TensorInfo& info,
               const std::string& origin) {
  if (info.shape != tensor.sizes) {
    throw StateError(fmt::format("{}: '{}' has shape {}; wanted: {}, that of the model's", origin,
                                 name, shape_text(info.shape), shape_text(tensor.sizes)));
  }
  if (info.dtype != tensor.tensor.scalar_type()) {
    throw StateError(fmt::format(
        "{}: '{}' has dtype {}; wanted: {}, that of the model's. Convert one of them", origin, name,
        c10::toString(info.dtype), c10::toString(tensor.tensor.scalar_type())));
  }
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.cpu().contiguous();
  const auto y = b.cpu().contiguous();
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace

const TensorInfo* TensorSource::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

DictSource::DictSource(const StateDict& state, std::string origin) : state_(state) {
  origin_ = std::move(origin);
  tensors_ = infos_of(state, origin_);
}

at::Tensor DictSource::read(const std::string& name, std::int64_t begin, std::int64_t numel) {
  return flat_range(state_.at(name), begin, numel);
}

BroadcastSource::BroadcastSource(const StateDict& state, std::string origin, const Ranks& ranks)
    : state_(state), ranks_(ranks) {
  origin_ = std::move(origin);
  const auto said = ranks.all_or_none([&]() -> std::string {
    if (ranks.rank() != 0) {
      return "";
    }
    json infos = json::array();
    for (const auto& [name, info] : infos_of(state, origin_)) {
      infos.push_back({name, static_cast<int>(info.dtype), info.shape});
    }
    return infos.dump();
  });
  for (const auto& info : json::parse(said.front())) {
    tensors_[info[0].get<std::string>()] = {static_cast<at::ScalarType>(info[1].get<int>()),
                                            info[2].get<std::vector<std::int64_t>>()};
  }
}

at::Tensor BroadcastSource::read(const std::string& name, std::int64_t begin, std::int64_t numel) {
  const auto& info = tensors_.at(name);
  auto whole = ranks_.rank() == 0
                   ? state_.at(name).detach().to(ranks_.device()).contiguous()
                   : at::empty(info.shape, at::TensorOptions(info.dtype).device(ranks_.device()));
  ranks_.broadcast(whole, 0);
  return flat_range(whole, begin, numel).clone();
}

FileSource::FileSource(const std::filesystem::path& path) : reader_(path) {
  origin_ = path.string();
  for (const auto& [name, entry] : reader_.entries()) {
    tensors_[name] = {entry.dtype, entry.shape};
  }
}

at::Tensor FileSource::read(const std::string& name, std::int64_t begin, std::int64_t numel) {
  return reader_.read(name, begin, numel);
}

ModelPlan plan_model(const std::vector<ModelTensor>& tensors, const TensorSource& source,
                     bool strict) {
  ModelPlan plan;
  std::set<std::string> known;
  std::vector<std::string> missing;
  for (const auto& tensor : tensors) {
    auto& present = plan.emplace_back();
    for (const auto& name : tensor.names) {
      known.insert(name);
      if (const auto* info = source.find(name)) {
        check_fit(tensor, name, *info, source.origin());
        present.push_back(name);
      }
    }
    if (present.empty()) {
      missing.push_back(tensor.name());
    }
  }
  std::vector<std::string> unexpected;
  for (const auto& [name, info] : source.tensors()) {
    if (!known.contains(name)) {
      unexpected.push_back(name);
    }
  }
  if (strict && !(missing.empty() && unexpected.empty())) {
    throw StateError(fmt::format(
        "{}: {}{}{}; wanted: exactly the {} tensors of the model", source.origin(),
        missing.empty() ? "" : "it lacks " + names_text(missing),
        missing.empty() || unexpected.empty() ? "" : ", and ",
        unexpected.empty() ? "" : "the model has no " + names_text(unexpected), tensors.size()));
  }
  return plan;
}

std::vector<at::Tensor> read_model(const std::vector<ModelTensor>& tensors, const ModelPlan& plan,
                                   TensorSource& source) {
  std::vector<at::Tensor> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    auto& piece = pieces.emplace_back();
    for (const auto& name : plan[i]) {
      auto values = source.read(name, tensor.begin, tensor.numel);
      if (piece.defined() && !same_bits(piece, values)) {
        throw StateError(fmt::format(
            "{}: '{}' and '{}' are one shared tensor in the model, but have different values; "
            "wanted: the same, or one of the two names only",
            source.origin(), plan[i].front(), name));
      }
      piece = std::move(values);
    }
  }
  return pieces;
}

void write_model(const std::vector<ModelTensor>& tensors, const std::vector<at::Tensor>& pieces) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (pieces[i].defined()) {
      auto target = tensors[i].tensor;
      target.copy_(pieces[i].view(target.sizes()));
    }
  }
}

}  // namespace fsdp
