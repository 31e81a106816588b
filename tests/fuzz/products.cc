// Any bytes as the blocks of a weight, of any format and shape: no read past them, on every instruction set, and
// the bits of the plain loops wherever those are numbers.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "pagedkv/cache.h"
#include "pagedkv/products.h"
#include "tests/fuzz/require.h"

namespace {

using namespace pagedkv;

std::vector<float> multiplied(const MatrixProducts& products, const WeightMatrix& w, const std::vector<float>& x) {
  const int64_t n_tokens = int64_t(x.size()) / w.n_in;
  const std::unique_ptr<std::byte[]> codes(
      new std::byte[size_t(MatrixProducts::quantized_bytes(w.n_in, n_tokens))]);
  require(products.quantize(x.data(), w.n_in, w.n_in, n_tokens, codes.get(), {}).ok());
  static std::byte* scratch = static_cast<std::byte*>(std::aligned_alloc(4096, 1 << 20));
  require(MatrixProducts::scratch_bytes() <= 1 << 20);
  std::vector<float> y(size_t(n_tokens * w.n_out));
  const MatrixProducts::Call call{
      .weight = w, .x = codes.get(), .n_tokens = n_tokens, .y = y.data(), .y_stride = w.n_out, .scratch = scratch};
  require(products.multiply(call, {}).ok());
  return y;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const auto format = weight_formats()[data[0] % weight_formats().size()];
  const int64_t n_out = 32 + data[1] % 40, n_tokens = 1 + data[2] % 14;
  const int64_t n_in =
      weight_block_elements(format) * (1 + data[3] % (weight_block_elements(format) == 32 ? 20 : 3));
  const int64_t row_bytes = weight_row_bytes(format, n_in);
  const auto n_bytes = size_t(n_out * row_bytes);
  // Exactly as many bytes as the weight has; the input's are repeated.
  const std::unique_ptr<std::byte[]> weight(new std::byte[n_bytes]);
  for (size_t i = 0; i < n_bytes; ++i) weight[i] = std::byte(data[i % size]);
  std::vector<float> x(size_t(n_tokens * n_in));
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(int8_t(data[i * 7 % size])) * 0.01f;

  const WeightMatrix w{
      .data = weight.get(), .format = format, .n_out = n_out, .n_in = n_in, .row_bytes = row_bytes};
  const std::vector<float> plain = multiplied(*MatrixProducts::create("scalar"), w, x);
  for (const IsaEntry& isa : isa_entries()) {
    const auto products = MatrixProducts::create(isa.name);
    if (!products.ok() || !products->fast()) continue;
    const std::vector<float> fast = multiplied(*products, w, x);
    for (size_t i = 0; i < plain.size(); ++i)
      require(!std::isfinite(plain[i]) ? !std::isfinite(fast[i]) : std::memcmp(&plain[i], &fast[i], 4) == 0);
  }
  return 0;
}
