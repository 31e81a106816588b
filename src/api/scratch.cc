#include "pagedkv/scratch.h"

#include "base/text.h"

namespace pagedkv {

Result<std::span<std::byte>> Scratch::get(Bytes bytes) {
  if (bytes > size_) {
    memory_.reset();  // before the new one, so that both are never there at once
    memory_.reset(static_cast<std::byte*>(::operator new(size_t(bytes.n), kAlignment, std::nothrow)));
    size_ = memory_ ? bytes : Bytes(0);
    if (!memory_) return Status(Code::kNoMemory, str("[scratch] no memory for ", bytes_text(bytes.n)));
  }
  return std::span(memory_.get(), size_t(bytes.n));
}

}  // namespace pagedkv
