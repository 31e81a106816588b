// What an Engine holds; shared by engine.cc (load, step) and generate.cc.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "engine/attention_node.h"
#include "engine/engine.h"
#include "engine/graph.h"
#include "engine/model.h"
#include "engine/text.h"

namespace pagedkv::engine {

// Grows, never shrinks; 64-byte aligned as the kernels ask.
class Scratch {
 public:
  // Contents are lost when it grows. False when there is no memory.
  bool reserve(size_t bytes) {
    if (bytes <= size_) return true;
    memory_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t(64), std::nothrow)));
    size_ = memory_ ? bytes : 0;
    return memory_ != nullptr;
  }
  std::span<std::byte> span() { return {memory_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

struct Engine::Impl {
  std::unique_ptr<Model> model;
  std::unique_ptr<Text> text;
  std::unique_ptr<Cache> cache;
  AttentionStep attention;
  std::unique_ptr<Graphs> graphs;  // points to model and attention
  Scratch scratch;
  Tokens context;
  Tokens chunk;
  int64_t min_columns = 1;  // of every matrix product; padded to Model::reproducible_columns() where asked
};

}  // namespace pagedkv::engine
