// Matrix products of quantized weights, read as they lie in a GGUF file, with vectors in f32.
//
// The vectors become 8-bit codes with a scale for every 32 elements, once for all weights that they meet; weights
// are unpacked on the way into registers. A result's bits depend on its weight row and its vector alone: not on the
// other vectors of the call, their number, the parts that share the work or the instruction set (docs/numerics.md,
// section 6).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "pagedkv/export.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

// By ggml's names; the blocks are ggml's.
enum class WeightFormat : uint8_t { kQ40, kQ41, kQ50, kQ51, kQ80, kIQ4NL, kQ3K, kQ4K, kQ5K, kQ6K, kIQ4XS };

// All of them.
PKV_API std::span<const WeightFormat> weight_formats();

PKV_API std::string_view weight_format_name(WeightFormat format);
// Elements of a row that one block holds, and the block's bytes.
PKV_API int64_t weight_block_elements(WeightFormat format);
PKV_API int64_t weight_block_bytes(WeightFormat format);
// Bytes of a row's blocks. Requires: n_in is whole blocks.
PKV_API int64_t weight_row_bytes(WeightFormat format, int64_t n_in);

// [n_out, n_in]: y = W x has n_out elements for n_in of x. Borrowed; rows lie row_bytes apart.
struct WeightMatrix {
  const std::byte* data = nullptr;
  WeightFormat format = WeightFormat::kQ40;
  int64_t n_out = 0;
  int64_t n_in = 0;
  int64_t row_bytes = 0;
};

namespace products {
struct Entry;
}

// Const members: any thread.
class PKV_API MatrixProducts {
 public:
  // isa: an entry by name; empty: the best of this machine (or PAGEDKV_ISA). Errors: kInvalidArgument with the name
  // and those that run here.
  static Result<MatrixProducts> create(const std::string& isa = "");

  std::string_view isa() const;
  // False where another library is faster: on the scalar entry, on CPUs without one of ours.
  bool fast() const;

  // Whether multiply takes such a weight: at least 32 rows, and whole blocks to a row.
  static bool takes(WeightFormat format, int64_t n_out, int64_t n_in);

  // Bytes for n_tokens vectors of n_in elements. Requires: n_in is a multiple of 32; no overflow at 2^40 elements.
  static int64_t quantized_bytes(int64_t n_in, int64_t n_tokens);
  // Bytes that a part of multiply works in, whatever the shapes.
  static int64_t scratch_bytes();

  // This part's share of n_tokens vectors.
  //   x   [n_tokens, n_in] f32, rows x_stride floats apart
  //   to  quantized_bytes(n_in, n_tokens), aligned to 4
  // A vector's group of 32 with NaN or infinity gives NaN in every result. Errors: kInvalidArgument (n_in).
  Status quantize(const float* x, int64_t x_stride, int64_t n_in, int64_t n_tokens, std::byte* to, Part part) const;

  struct Call {
    WeightMatrix weight;
    const std::byte* x = nullptr;  // what quantize wrote, all parts of it
    int64_t n_tokens = 0;
    float* y = nullptr;  // [n_tokens, n_out] f32, rows y_stride floats apart
    int64_t y_stride = 0;
    std::byte* scratch = nullptr;  // scratch_bytes(), aligned to 64; of this part alone
  };
  // This part's share of y. Reads no byte past a row's blocks. Errors: kInvalidArgument (a weight it does not
  // take).
  Status multiply(const Call& call, Part part) const;

 private:
  explicit MatrixProducts(const products::Entry* entry) : entry_(entry) {}
  const products::Entry* entry_;
};

}  // namespace pagedkv
