#pragma once
// The errors that the library raises. There is one type for each kind of mistake, so that a program
// can tell them apart, and every message names the rank, the thing, what was seen, what was wanted
// and what to do about it.

#include <stdexcept>
#include <string>

namespace fsdp {

/// The base of everything below. Catch this to catch any error of the library.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An option, argument or environment variable is missing, malformed or impossible.
struct UsageError : Error {
  using Error::Error;
};

/// A module cannot be sharded as asked (a parameter that is not dense, of mixed dtype, already
/// sharded, on another device).
struct ShardingError : Error {
  using Error::Error;
};

/// Ranks called collectives that do not match: another operation, size, dtype or reduction.
struct MismatchError : Error {
  using Error::Error;
};

/// Another rank left the process group, by an exception or by returning early.
struct PeerError : Error {
  using Error::Error;
};

/// A collective did not complete within its timeout.
struct TimeoutError : Error {
  using Error::Error;
};

/// A value that must be finite is not (NaN or infinity).
struct NonFiniteError : Error {
  using Error::Error;
};

/// A file is missing, truncated, damaged, of another kind or version, or cannot be written; the
/// message names the file and the place in it.
struct FileError : Error {
  using Error::Error;
};

/// A state does not fit the model or optimizer: names, shapes, dtypes, parameter groups.
struct StateError : Error {
  using Error::Error;
};

}  // namespace fsdp
