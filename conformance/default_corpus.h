#pragma once
// The text that the main job trains on.

#include <string>
#include <vector>

namespace shardproof {

/// This project's own sources and documents, as they lay in the source folder that the program was
/// built from: files under impl, reference, conformance, fault_injection and ci, and the README, in
/// name order. Throws ScenarioError if that folder is gone.
std::vector<std::string> default_corpus();

/// Files as they are, folders as all regular files below them (hidden ones excepted), each folder
/// in name order. Throws ScenarioError for a path that does not exist, and for a folder without
/// files.
std::vector<std::string> expand_corpus(const std::vector<std::string>& paths);

}  // namespace shardproof
