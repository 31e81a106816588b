// Memory for what attend hands to merge.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

#include "pagedkv/export.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

// Bytes on a 64-byte boundary, as AttendArgs::scratch wants them; they grow and never shrink. One thread.
class PKV_API Scratch {
 public:
  // `bytes` of it, valid until the next get(); what they hold is not kept. Errors: kNoMemory; what was there is
  // gone.
  Result<std::span<std::byte>> get(Bytes bytes);

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  Bytes size_{0};
};

}  // namespace pagedkv
