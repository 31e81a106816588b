// Blocks in a folder of this machine: they survive a restart, and the folder never outgrows its budget.
#pragma once

#include <memory>
#include <string>

#include "pagedkv/tier.h"

namespace pagedkv {

struct DiskTierOptions {
  enum class Sync : uint8_t {
    kNever,   // what the system has not written is lost with the machine's power
    kSecond,  // a power cut loses a second, the end of the process nothing
    kEach,    // a put returns when its images are on the disk
  };
  std::string directory;            // made if it is not there, with mode 0700
  Bytes budget{int64_t{20} << 30};  // of the whole folder as it lies on the disk; at least 16 MiB
  Bytes chunk{0};                   // size of a file of images; 0: a 32nd of the budget, 4 MiB to 1 GiB
  Sync sync = Sync::kSecond;
};

// Errors: kInvalidArgument; kUnavailable when another process has the folder, or the system refuses it;
// kUnsupported when the folder is another program's, or of another version.
PKV_API Result<std::unique_ptr<Tier>> open_disk_tier(const DiskTierOptions& options);

}  // namespace pagedkv
