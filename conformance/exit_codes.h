#pragma once
// What the shardproof command ends with. Never a count.

namespace shardproof {

inline constexpr int kExitHeld = 0;          // every check held
inline constexpr int kExitFailed = 1;        // a check failed
inline constexpr int kExitUsage = 2;         // wrong usage or input
inline constexpr int kExitInconclusive = 3;  // nothing can be said
inline constexpr int kExitInvalid = 4;       // a list, waiver or package is invalid
inline constexpr int kExitBroken = 70;       // the harness itself broke
inline constexpr int kExitTimedOut = 124;    // a deadline passed
inline constexpr int kExitSkipped = 77;      // only between a launcher and CTest

}  // namespace shardproof
