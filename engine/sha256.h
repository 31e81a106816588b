// SHA-256 by OpenSSL, piece by piece.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "pagedkv/prefix.h"

namespace pagedkv::engine {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void add(const void* data, size_t n);
  // Nothing when OpenSSL has failed, here or before.
  std::optional<PrefixKey> finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
  bool ok_;
};

std::string hex(const PrefixKey& key);

}  // namespace pagedkv::engine
