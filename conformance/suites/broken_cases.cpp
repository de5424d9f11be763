// A library of modules to recompute that does what the variable BROKEN_CASES says.

#include <fsdp/recomputation_library.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

extern "C" __attribute__((visibility("default"))) void fsdp_recomputation_cases(
    std::vector<fsdp::RecomputationCase>* cases) {
  const std::string how = std::getenv("BROKEN_CASES");
  const auto add = [cases](const std::string& name) {
    cases->push_back({name, [](const fsdp::RecomputationOptions&) -> fsdp::RecomputationReport {
                        throw std::runtime_error("thrown by the module");
                      }});
  };
  if (how == "throws") {
    throw std::runtime_error("thrown through C");
  }
  if (how == "throws_an_int") {
    throw 1;
  }
  if (how == "unnamed") {
    add("");
  }
  if (how == "empty") {
    cases->push_back({"empty", nullptr});
  }
  if (how == "twice") {
    add("same");
    add("same");
  }
  if (how == "well") {
    add("module");
  }
}
