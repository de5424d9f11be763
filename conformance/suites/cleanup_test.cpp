// A signal ends a program in good order: what it would leave behind goes, what must be whole is
// whole, and a second signal needs no patience. (command_test has the whole command.)

#include "conformance/cleanup.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>

#include "conformance/suites/temporary_folder.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// A process that does `work` and then waits to be ended.
class Program {
 public:
  explicit Program(const std::function<void(const std::function<void()>& ready)>& work) {
    int ends[2];
    if (::pipe(ends) != 0) {
      throw std::runtime_error("no pipe");
    }
    pid_ = ::fork();
    if (pid_ == 0) {
      for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        ::signal(signal, SIG_DFL);
      }
      work([&] { [[maybe_unused]] const auto written = ::write(ends[1], "r", 1); });
      while (true) {
        ::pause();
      }
    }
    ::close(ends[1]);
    char byte = 0;
    ready_ = ::read(ends[0], &byte, 1) == 1;
    ::close(ends[0]);
  }
  ~Program() {
    if (!status_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  bool ready() const { return ready_; }
  void send(int signal) const { ::kill(pid_, signal); }
  /// The signal that ended it within the time; 0 if none did.
  int ended_by(milliseconds time) {
    const auto deadline = Clock::now() + time;
    while (!status_) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        status_ = status;
      } else if (Clock::now() > deadline) {
        return 0;
      } else {
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
    return WIFSIGNALED(*status_) ? WTERMSIG(*status_) : 0;
  }

 private:
  ::pid_t pid_ = -1;
  bool ready_ = false;
  std::optional<int> status_;
};

TEST(Cleanup, RemovesWhatIsLeftAndNotWhatWasGivenUp) {
  const TemporaryFolder folder;
  const auto left = folder.path() / "left";
  const auto kept = folder.path() / "kept";
  fs::create_directories(left / "inner");
  fs::create_directory(kept);
  Program program([&](const auto& ready) {
    clean_up_when_signalled();
    const Leftover leftover(left);
    { const Leftover given_up(kept); }
    ready();
    ::pause();
  });
  ASSERT_TRUE(program.ready());
  program.send(SIGTERM);
  EXPECT_EQ(program.ended_by(seconds(10)), SIGTERM);
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(kept));
}

TEST(Cleanup, RemovesAFolderThatAnotherThreadStillWritesInto) {
  const TemporaryFolder folder;
  const auto busy = folder.path() / "busy";
  fs::create_directory(busy);
  Program program([&](const auto& ready) {
    clean_up_when_signalled();
    const Leftover leftover(busy);
    ready();
    for (int i = 0;; ++i) {
      std::ofstream(busy / std::to_string(i)) << i;
    }
  });
  ASSERT_TRUE(program.ready());
  std::this_thread::sleep_for(milliseconds(200));
  program.send(SIGINT);
  EXPECT_EQ(program.ended_by(seconds(10)), SIGINT);
  EXPECT_FALSE(fs::exists(busy));
}

TEST(Cleanup, WaitsForWhatMustBeWhole) {
  const TemporaryFolder folder;
  const auto done = folder.path() / "done";
  Program program([&](const auto& ready) {
    clean_up_when_signalled();
    const auto whole = uninterrupted();
    ready();
    std::this_thread::sleep_for(milliseconds(300));
    fs::create_directory(done);
  });
  ASSERT_TRUE(program.ready());
  program.send(SIGHUP);
  EXPECT_EQ(program.ended_by(seconds(10)), SIGHUP);
  EXPECT_TRUE(fs::exists(done));
}

TEST(Cleanup, TakesTheSameSignalTwiceAtOnceForOne) {
  const TemporaryFolder folder;
  const auto left = folder.path() / "left";
  fs::create_directory(left);
  Program program([&](const auto& ready) {
    clean_up_when_signalled();
    const Leftover leftover(left);
    {
      const auto whole = uninterrupted();  // so that the second comes before the removal
      ready();
      std::this_thread::sleep_for(milliseconds(300));
    }
    ::pause();
  });
  ASSERT_TRUE(program.ready());
  program.send(SIGTERM);
  std::this_thread::sleep_for(milliseconds(50));
  program.send(SIGTERM);
  EXPECT_EQ(program.ended_by(seconds(10)), SIGTERM);
  EXPECT_FALSE(fs::exists(left));
}

TEST(Cleanup, IsCutShortByASecondSignal) {
  Program program([](const auto& ready) {
    clean_up_when_signalled();
    const auto whole = uninterrupted();  // as a removal that takes for ever
    ready();
    ::pause();
  });
  ASSERT_TRUE(program.ready());
  program.send(SIGTERM);
  EXPECT_EQ(program.ended_by(milliseconds(900)), 0) << "it did not wait";
  program.send(SIGINT);
  EXPECT_EQ(program.ended_by(seconds(10)), SIGINT);
}

TEST(Cleanup, LeavesASignalIgnoredThatWasIgnoredBefore) {
  Program program([](const auto& ready) {
    ::signal(SIGHUP, SIG_IGN);  // nohup(1)
    clean_up_when_signalled();
    ready();
  });
  ASSERT_TRUE(program.ready());
  program.send(SIGHUP);
  EXPECT_EQ(program.ended_by(milliseconds(300)), 0);
  program.send(SIGTERM);
  EXPECT_EQ(program.ended_by(seconds(10)), SIGTERM);
}

}  // namespace
}  // namespace shardproof
