#include "conformance/checkpoint_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fsdp/activation_checkpoint.h>
#include <fsdp/errors.h>
#include <fsdp/random.h>
#include <fsdp/recomputation_library.h>
#include <torch/torch.h>

#include <algorithm>
#include <ostream>

#include "reference/data.h"
#include "reference/models.h"

namespace shardproof {
namespace {

CheckedRegion checked(const std::string& name,
                      const std::function<fsdp::RecomputationReport()>& check) {
  CheckedRegion region;
  region.name = name;
  try {
    region.report = check();
  } catch (const std::exception& error) {
    region.trouble = error.what();
  } catch (...) {
    region.trouble = "it threw something that is no std::exception";
  }
  return region;
}

std::string verdict_of(const CheckedRegion& region) {
  if (region.holds()) {
    return "equal";
  }
  if (!region.trouble.empty() || !region.report.error.empty()) {
    return "failed";
  }
  return region.report.tensors == 0 ? "nothing saved"
                                    : fmt::format("{} differ", region.report.differences.size());
}

}  // namespace

std::vector<CheckedRegion> check_layers(const Scenario& scenario) {
  auto model = make_model(scenario);
  load_parameters(*model, initial_parameters(scenario));
  fsdp::seed_rank_generator(scenario.seed, 0);
  std::vector<CheckedRegion> regions;
  for (const auto& layer : model->layers()) {
    regions.push_back({layer.name, {}, ""});
  }
  for (std::size_t i = 0; i < regions.size(); ++i) {
    fsdp::RecomputationOptions options;
    options.name = regions[i].name;
    // The model runs as it is, and its layers report as backward passes them.
    fsdp::checkpoint_module(*model->layers()[i].module,
                            fsdp::reporting_to(regions[i].report, options));
  }
  const auto batch = Dataset(scenario).batch(/*step=*/0, /*micro_batch=*/0, /*rank=*/0);
  const auto dtype = dtype_named(scenario.dtype);
  const auto call = [&](const torch::Tensor& input) {
    return model(input.is_floating_point() ? input.to(dtype) : input);
  };
  try {
    model->training_loss(call, batch.input, batch.target).backward();
  } catch (const fsdp::RecomputationError& error) {
    // Names the region; those that lie before it have not run again.
    for (auto& region : regions) {
      if (region.report.tensors == 0) {
        region.trouble = error.what();
      }
    }
  }
  return regions;
}

std::vector<CheckedRegion> check_library(const std::filesystem::path& library,
                                         const std::vector<std::string>& only) {
  const auto cases = fsdp::load_recomputation_library(library);
  std::vector<std::string> names;
  for (const auto& each : cases) {
    names.push_back(each.name);
  }
  for (const auto& name : only) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      throw fsdp::UsageError(fmt::format("recomputation library {} has no case {}; wanted: {}",
                                         library.string(), name, fmt::join(names, ", ")));
    }
  }
  std::vector<CheckedRegion> regions;
  for (const auto& each : cases) {
    if (only.empty() || std::find(only.begin(), only.end(), each.name) != only.end()) {
      fsdp::RecomputationOptions options;
      options.name = each.name;
      regions.push_back(checked(each.name, [&] { return each.check(options); }));
    }
  }
  return regions;
}

void print_regions(std::ostream& out, const std::vector<CheckedRegion>& regions) {
  std::size_t width = 6;
  for (const auto& region : regions) {
    width = std::max(width, region.name.size());
  }
  out << fmt::format("{:<{}}  {:>7}  {:>12}  {}\n", "region", width, "tensors", "bytes", "verdict");
  out << std::string(width + 32, '-') << "\n";
  for (const auto& region : regions) {
    out << fmt::format("{:<{}}  {:>7}  {:>12}  {}\n", region.name, width, region.report.tensors,
                       region.report.bytes, verdict_of(region));
  }
  for (const auto& region : regions) {
    if (region.holds()) {
      continue;
    }
    out << "\n" << region.name << "\n";
    constexpr std::size_t kShown = 3;
    const auto& differences = region.report.differences;
    for (std::size_t i = 0; i < std::min(kShown, differences.size()); ++i) {
      out << fmt::format(
          "  saved tensor {} ({}): {}\n", differences[i].index,
          differences[i].operation.empty() ? "of no operator" : differences[i].operation,
          differences[i].what);
    }
    if (differences.size() > kShown) {
      out << fmt::format("  and {} more\n", differences.size() - kShown);
    }
    for (const auto& trouble : {region.trouble, region.report.error}) {
      if (!trouble.empty()) {
        out << "  " << trouble << "\n";
      }
    }
  }
}

}  // namespace shardproof
