// Counts and identities as types, so that tokens cannot be added to blocks.
#pragma once

#include <compare>
#include <cstdint>

namespace pagedkv {

// A count of one kind of thing. Arithmetic stays inside the kind; `.n` is the plain number.
template <class Kind>
struct Count {
  int64_t n = 0;

  constexpr Count() = default;
  constexpr explicit Count(int64_t count) : n(count) {}
  constexpr auto operator<=>(const Count&) const = default;
  constexpr Count& operator+=(Count other) {
    n += other.n;
    return *this;
  }
  constexpr Count& operator-=(Count other) {
    n -= other.n;
    return *this;
  }
  friend constexpr Count operator+(Count a, Count b) { return Count(a.n + b.n); }
  friend constexpr Count operator-(Count a, Count b) { return Count(a.n - b.n); }
  friend constexpr Count operator*(Count a, int64_t factor) { return Count(a.n * factor); }
};

using Tokens = Count<struct TokenKind>;
using Blocks = Count<struct BlockKind>;
using Bytes = Count<struct ByteKind>;

// Blocks that hold `tokens` slots of `block_size` tokens each, rounded up.
constexpr Blocks blocks_for(Tokens tokens, Tokens block_size) {
  return Blocks(tokens.n / block_size.n + (tokens.n % block_size.n > 0));
}

// The place of a block in its group's arena; an identity, not a count.
enum class BlockId : uint32_t {};
inline constexpr BlockId kNoBlock{0xffffffffu};  // appears as -1 in block tables

// Block ids are int32 in block tables, so a group never has more blocks than this.
inline constexpr int64_t kMaxBlocks = 0x7fffffff;
// Positions and lengths are int32 in plans: no sequence, and no step, has more tokens than this.
inline constexpr int64_t kMaxTokens = 0x7fffffff;

// A sequence of a cache. The generation makes a handle to a released sequence detectable: it is refused.
struct SequenceId {
  uint32_t index = 0xffffffffu;
  uint32_t generation = 0;
  constexpr bool operator==(const SequenceId&) const = default;
};

// Share `index` of `count` of a kernel's work. Threads belong to the caller.
struct Part {
  int index = 0;
  int count = 1;
};

}  // namespace pagedkv
