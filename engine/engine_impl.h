// What an Engine holds; shared by engine.cc (load, step) and generate.cc.
#pragma once

#include <memory>

#include "engine/attention_node.h"
#include "engine/engine.h"
#include "engine/graph.h"
#include "engine/model.h"
#include "engine/text.h"
#include "engine/tier_traffic.h"
#include "pagedkv/scratch.h"

namespace pagedkv::engine {

struct Engine::Impl {
  std::unique_ptr<Model> model;
  std::unique_ptr<Text> text;
  std::unique_ptr<Cache> cache;
  std::unique_ptr<TierTraffic> tier;  // holds blocks of the cache
  AttentionStep attention;
  std::unique_ptr<Products> products;
  std::unique_ptr<Graphs> graphs;  // points to model, attention and products
  Scratch scratch;
  Tokens context;
  Tokens chunk;
  int64_t min_columns = 1;  // of every matrix product; padded to reproducible_columns() where asked
};

}  // namespace pagedkv::engine
