// Blocks to store, and folders to store them in.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "base/hash.h"
#include "pagedkv/disk_tier.h"

namespace pagedkv {

inline Deadline later() { return std::chrono::steady_clock::now() + std::chrono::minutes(10); }

// A block that anyone can make again from its chain's number and its depth.
struct Sample {
  std::vector<int32_t> tokens;
  std::vector<std::byte> image;
  TierBlock block;

  Sample(uint32_t chain, uint32_t depth, int64_t image_bytes, uint32_t group = 0) {
    std::mt19937_64 random(uint64_t(chain) << 32 | depth);
    for (int i = 0; i < 16; ++i) tokens.push_back(int32_t(random()));
    image.resize(size_t(image_bytes));
    for (size_t i = 0; i < image.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(image.data() + i, &word, std::min<size_t>(8, image.size() - i));
    }
    block = {.key = key(chain, depth),
             .parent = key(chain, depth - 1),
             .descriptor = sha256("a cache"),
             .group = group,
             .depth = depth,
             .tokens = tokens};
  }
  Sample(const Sample&) = delete;

  static Key key(uint32_t chain, uint32_t depth) {
    return sha256(std::to_string(chain) + "/" + std::to_string(int32_t(depth)));
  }
  TierPut put() const { return {.block = block, .image = image}; }
};

inline TierOutcome put(Tier& tier, const Sample& sample, std::chrono::seconds keep = {}) {
  TierPut item = sample.put();
  item.keep = keep;
  tier.put({&item, 1}, later());
  return item.outcome;
}

// The outcome; kDone only if the image is the sample's.
inline TierOutcome get(Tier& tier, const Sample& sample) {
  std::vector<std::byte> image(sample.image.size());
  TierGet item{.block = sample.block, .image = image};
  tier.get({&item, 1}, later());
  if (item.outcome == TierOutcome::kDone) {
    EXPECT_TRUE(image == sample.image) << "wrong bytes";
  }
  return item.outcome;
}

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "pagedkv-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Folder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  Folder(const Folder&) = delete;
  // Of a tier, which makes it.
  std::string path() const { return path_ + "/blocks"; }
  DiskTierOptions options(int64_t budget = int64_t{64} << 20) const {
    return {.directory = path(), .budget = Bytes(budget)};
  }
  std::unique_ptr<Tier> open(int64_t budget = int64_t{64} << 20) const {
    auto tier = open_disk_tier(options(budget));
    EXPECT_TRUE(tier.ok()) << tier.status().message();
    return tier.ok() ? std::move(*tier) : nullptr;
  }

 private:
  std::string path_;
};

}  // namespace pagedkv
