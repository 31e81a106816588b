// What a call gives back: a Status, or a Result that holds either a value or a Status.
//
// Everything the world can cause (bad input, no room, a broken file) arrives here. The library never throws,
// prints or aborts on input.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "pagedkv/export.h"

namespace pagedkv {

enum class Code : uint8_t {
  kOk,
  kInvalidArgument,  // the caller asked for something that can never work; the message names value and limit
  kCapacity,         // no room now: need and have are in the message; nothing was changed
  kNotFinite,        // NaN or infinity in K or V; the message names layer, head and position
  kStale,            // the handle's sequence has been released
  kNotFound,         // a file, model or entry that is not there
  kUnsupported,      // well-formed, but this build does not do it; the message lists what works
  kCorrupt,          // bytes that contradict themselves or their header
  kUnavailable,      // the operating system refused (I/O, a thread, an end that has come); trying again may work
  kNoMemory,         // the operating system, or the cgroup, gave no more memory; nothing was changed
  kInternal,         // an invariant of ours is broken; the cache refuses further work on what it concerns
};

// "invalid argument", "capacity", ...
PKV_API const char* code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline Status invalid_argument(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

template <class T>
class [[nodiscard]] Result {
 public:
  Result(Status status) : held_(std::move(status)) {}  // NOLINT: conversion is the point
  Result(T value) : held_(std::move(value)) {}         // NOLINT

  bool ok() const { return std::holds_alternative<T>(held_); }
  // The reason of a failed call; an ok Status when there is a value.
  Status status() const { return ok() ? Status() : std::get<Status>(held_); }

  // Requires: ok().
  T& value() & { return std::get<T>(held_); }
  const T& value() const& { return std::get<T>(held_); }
  T&& value() && { return std::get<T>(std::move(held_)); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }

 private:
  std::variant<Status, T> held_;
};

}  // namespace pagedkv
