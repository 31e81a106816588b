// Every weight type that ggml can write quickly and multiply runs, and gives libllama's logits.
#include <ggml-cpp.h>
#include <ggml-cpu.h>
#include <gguf.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>
#include <vector>

#include "tests/engine/files.h"
#include "tests/engine/oracle.h"
#include "tests/engine/world.h"

namespace pagedkv::engine {
namespace {

// ggml builds tables of codebooks before it writes these, which takes seconds each.
bool is_slow_to_write(ggml_type type) {
  return type == GGML_TYPE_IQ3_XXS || type == GGML_TYPE_IQ3_S || type == GGML_TYPE_IQ2_S || type == GGML_TYPE_IQ1_M;
}

// The tiny model with all matrices, the embedding too, in another type. Empty when ggml does not write that type.
Contents with_matrices_of(ggml_type type) {
  ggml_context* tensors = nullptr;
  const gguf_context_ptr in(
      gguf_init_from_file(tiny_model("d64_wide").c_str(), {.no_alloc = false, .ctx = &tensors}));
  const ggml_context_ptr owner(tensors);
  const ggml_context_ptr written(ggml_init({.mem_size = 64 << 20, .mem_buffer = nullptr, .no_alloc = false}));
  const gguf_context_ptr out(gguf_init_empty());
  gguf_set_kv(out.get(), in.get());
  for (ggml_tensor* t = ggml_get_first_tensor(tensors); t; t = ggml_get_next_tensor(tensors, t)) {
    if (!std::string_view(t->name).ends_with(".weight")) continue;  // the file's data as a whole
    ggml_tensor* copy = t;
    if (t->ne[1] > 1) {
      copy = ggml_new_tensor(written.get(), type, 2, t->ne);
      ggml_set_name(copy, t->name);
      const auto* from = static_cast<const float*>(t->data);
      if (ggml_quantize_chunk(type, from, copy->data, 0, t->ne[1], t->ne[0], nullptr) != ggml_nbytes(copy))
        return {};
    }
    gguf_add_tensor(out.get(), copy);
  }
  const TemporaryFile file({});
  if (!gguf_write_to_file(out.get(), file.path().c_str(), false)) return {};
  return read_file(file.path());
}

// Chunks of 1 to 16 columns give the bits of 40 at once.
void expect_reproducible(const std::string& path, std::string_view type) {
  World world({.model_path = path,
               .threads = 1,
               .num_blocks = Blocks(64),
               .kv_memory = Bytes(64 << 20),
               .reproducible = true});
  const auto tokens = random_tokens(40, world.vocab_size(), 2);
  EXPECT_EQ(world.logits(tokens, {1, 2, 3, 9, 5, 16, 4}), world.logits(tokens, {40})) << type;
}

TEST(WeightTypes, GiveLibllamasLogitsAndReproducibleOnes) {
  ggml_cpu_init();
  int n_types = 0;
  for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
    const auto type = ggml_type(i);
    const bool float_type = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
    if (ggml_blck_size(type) == 0 || !ggml_get_type_traits_cpu(type)->vec_dot) continue;
    if (!float_type && (!ggml_is_quantized(type) || ggml_quantize_requires_imatrix(type))) continue;
    if (is_slow_to_write(type)) continue;
    const Contents contents = with_matrices_of(type);
    if (contents.empty()) continue;
    const TemporaryFile file(contents);
    World world({.model_path = file.path(),
                 .threads = 1,
                 .kv_formats = {.k = Format::kF32, .v = Format::kF32},
                 .num_blocks = Blocks(64),
                 .kv_memory = Bytes(64 << 20)});
    Oracle oracle(file.path(), {.context = 256});
    const auto tokens = random_tokens(40, world.vocab_size(), 1);
    // Quantized products round activations, too: the last bit of one attention may choose another step of 1/127.
    EXPECT_LE(worst_error(world.logits(tokens, {40}), oracle.logits(tokens), world.vocab_size()), 0.1)
        << ggml_type_name(type);
    expect_reproducible(file.path(), ggml_type_name(type));
    ++n_types;
    std::printf("%s ", ggml_type_name(type));
  }
  std::printf("\n");
  EXPECT_GE(n_types, 15);
}

}  // namespace
}  // namespace pagedkv::engine
