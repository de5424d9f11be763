// Backends from shared libraries: the ways in which a library can be wrong, each in plain words.
// (launch_test runs the example plugin as a vendor would.)

#include <fsdp/backend_library.h>
#include <fsdp/errors.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "conformance/suites/temporary_folder.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

BackendRequest request() {
  BackendRequest request;
  request.rank = 3;
  request.world_size = 8;
  request.timeout_ms = 1000;
  return request;
}

std::string refusal(const fs::path& library, const BackendRequest& request) {
  try {
    load_backend_library(library, request);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "it was taken";
}

std::string refusal_of_broken(const char* how) {
  ::setenv("BROKEN_BACKEND", how, 1);
  return refusal(SHARDPROOF_BROKEN_BACKEND, request());
}

TEST(BackendLibrary, IsLoadedAndMakesItsBackend) {
  ::setenv("BROKEN_BACKEND", "well", 1);
  const auto backend = load_backend_library(SHARDPROOF_BROKEN_BACKEND, request());
  EXPECT_EQ(backend->getBackendName(), "empty");
  EXPECT_EQ(backend->getRank(), 3);
  EXPECT_EQ(backend.use_count(), 1U) << "the one reference was taken over";
}

TEST(BackendLibrary, ThatIsNotThereIsNamed) {
  EXPECT_THAT(refusal("/nowhere/libx.so", request()),
              AllOf(HasSubstr("rank 3: backend library /nowhere/libx.so: there is no such file"),
                    HasSubstr("wanted: ")));
  EXPECT_THAT(refusal("/tmp", request()), HasSubstr("no such file")) << "a folder";
}

TEST(BackendLibrary, ThatIsNoLibraryIsNamed) {
  const shardproof::TemporaryFolder folder;
  const auto file = folder.path() / "libtext.so";
  std::ofstream(file) << "this is no library";
  EXPECT_THAT(refusal(file, request()),
              AllOf(HasSubstr("rank 3: "), HasSubstr("libtext.so: it cannot be loaded: ")));
}

TEST(BackendLibrary, WithoutTheFunctionIsNamed) {
  EXPECT_THAT(refusal(SHARDPROOF_OTHER_LIBRARY, request()),
              HasSubstr("it has no function fsdp_make_backend"));
}

TEST(BackendLibrary, ThatMakesNothingSaysWhy) {
  EXPECT_THAT(refusal_of_broken("says_why"),
              HasSubstr("made no backend: no such device; wanted: "));
  EXPECT_THAT(refusal_of_broken("silent"), HasSubstr("made no backend: it did not say why"));
  EXPECT_THAT(refusal_of_broken("no_final_zero"), HasSubstr("made no backend: xxxx"));
}

TEST(BackendLibrary, ThatLetsAnExceptionThroughIsNamed) {
  EXPECT_THAT(refusal_of_broken("throws"), HasSubstr("let an exception through: thrown through C"));
  EXPECT_THAT(refusal_of_broken("throws_an_int"), HasSubstr("let an exception through, of a type"));
}

TEST(BackendLibrary, OfAnotherRankIsRefused) {
  EXPECT_THAT(refusal_of_broken("other_rank"),
              AllOf(HasSubstr("its backend is rank 4 of 8"), HasSubstr("wanted: rank 3 of 8")));
}

TEST(BackendLibrary, TheExampleWantsItsVersionAndAStore) {
  EXPECT_THAT(refusal(SHARDPROOF_BACKEND_PLUGIN, request()), HasSubstr("called without a store"));
  auto newer = request();
  ++newer.version;
  EXPECT_THAT(refusal(SHARDPROOF_BACKEND_PLUGIN, newer), HasSubstr("build it again"));
}

}  // namespace
}  // namespace fsdp
