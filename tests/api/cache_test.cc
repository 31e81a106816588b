// The cache with its kernels: content, bits, memory, errors.

#include "tests/api/desk.h"

#include <filesystem>
#include <locale>
#include <tuple>

#include "pagedkv/log.h"

namespace pagedkv {
namespace {

std::string text_of(const KvQuantConfig& config) { return kv_quant_name(config); }

TEST(Cache, DecodeStepByStepIsAttentionOverWhatWasStoredInEveryFormat) {  // O-NUM-11, O-MEM-02
  for (const QueryPath path : {QueryPath::kF32, QueryPath::kInt8}) {
    for (const auto& config : kConfigs) {
      SCOPED_TRACE(text_of(config) + " " + query_path_name(path));
      Desk d({.formats = config, .layers = 3, .block_size = 4, .num_blocks = 1, .query_path = path});
      d.prefill("a", tokens(0, 3));
      for (int32_t t = 3; t < 40; ++t) {
        const Outputs out = d.append("a", {t});
        d.expect_right("a", out);
        EXPECT_EQ(d.cache->blocks_held(d.ids["a"])->n, (t + 1 + 3) / 4);
      }
      EXPECT_EQ(d.cache->stats().growth_bytes_copied, 0);
    }
  }
}

TEST(Cache, TheQueryPathIsInt8OnlyWhereThereAreCodesAndPartOfEveryKey) {
  const auto path_of = [](const KvQuantConfig& formats, QueryPath asked) {
    return Desk({.formats = formats, .query_path = asked}).cache->query_path();
  };
  EXPECT_EQ(path_of({Format::kF16, Format::kF16}, QueryPath::kInt8), QueryPath::kF32);
  EXPECT_EQ(path_of({Format::kF16, Format::kQ4}, QueryPath::kInt8), QueryPath::kInt8);
  EXPECT_EQ(path_of({Format::kQ8, Format::kQ8}, QueryPath::kF32), QueryPath::kF32);
  const auto key_of = [](QueryPath asked) {
    const Desk d({.formats = {Format::kQ8, Format::kQ8}, .query_path = asked});
    return d.cache->match(tokens(0, 16)).keys[0];
  };
  EXPECT_FALSE(key_of(QueryPath::kF32) == key_of(QueryPath::kInt8));
  EXPECT_EQ(parse_query_path("int8").value(), QueryPath::kInt8);
  EXPECT_EQ(parse_query_path("fp8").status().code(), Code::kInvalidArgument);
}

TEST(Cache, BlocksOfOneTokenGiveWhatBlocksOfSixteenGive) {  // O-NUM-14
  Desk one({.block_size = 1}), sixteen({.block_size = 16});
  for (const int32_t n : {1, 2, 17}) {
    const std::string name = std::to_string(n);
    EXPECT_TRUE(same_bits(one.prefill(name, tokens(0, n)), sixteen.prefill(name, tokens(0, n))));
    EXPECT_EQ(one.cache->blocks_held(one.ids[name])->n, n);
    one.fork(name, name + "f");
    one.append(name + "f", {99});
    one.expect_right(name, one.append(name, {98}));
    ASSERT_TRUE(one.truncate(name, 1).ok());
    one.expect_right(name, one.append(name, {97}));
  }
  while (!one.ids.empty()) one.close(one.ids.begin()->first);
  one.cache->clear_cached();
  EXPECT_EQ(one.cache->stats().blocks_free, one.cache->stats().blocks_total);
}

TEST(Cache, AWindowIsTheSameInDecodePrefillAndChunks) {  // O-NUM-18, O-LIFE-14, O-LIFE-15
  for (const int64_t window : {1, 4, 6, 8, 70}) {
    DeskOptions options{.window = window, .block_size = 4, .sharing = false};
    Desk whole(options), chunks(options), decode(options);
    const Outputs expected = whole.prefill("a", tokens(0, 90));
    EXPECT_TRUE(same_bits(chunks.prefill("a", tokens(0, 90), 3), expected));
    EXPECT_TRUE(same_bits(decode.prefill("a", tokens(0, 90), 1), expected));
    EXPECT_LE(decode.cache->blocks_held(decode.ids["a"])->n, window / 4 + 2);
  }
}

TEST(Cache, TruncatedQuantizedRowsAreReplacedLikeAFreshRun) {  // O-LIFE-02
  for (const auto& config : {KvQuantConfig{Format::kQ8, Format::kQ8}, KvQuantConfig{Format::kQ4, Format::kQ4}}) {
    Desk trimmed({.formats = config, .block_size = 4}), fresh({.formats = config, .block_size = 4});
    trimmed.prefill("a", tokens(0, 10));
    ASSERT_TRUE(trimmed.truncate("a", 5).ok());
    std::vector<int32_t> all = tokens(0, 5);
    const auto rest = tokens(100, 105);
    all.insert(all.end(), rest.begin(), rest.end());
    Outputs out = trimmed.append("a", rest);
    for (auto& layer : out) layer.erase(layer.begin(), layer.end() - trimmed.o.heads_q * trimmed.o.dv);
    EXPECT_TRUE(same_bits(out, fresh.prefill("a", all)));
    trimmed.fork("a", "b");
    trimmed.expect_right("b", trimmed.append("b", {7}));
  }
}

TEST(Cache, TenForksOfAQuantizedBlockKeepItsBits) {  // O-LIFE-09
  Desk d({.formats = {Format::kQ8, Format::kQ8}, .block_size = 16});
  d.prefill("g0", tokens(0, 6));
  const auto first = d.cache->read_dense(d.ids["g0"], 0)->k;
  for (int i = 0; i < 10; ++i) {
    const std::string from = "g" + std::to_string(i), to = "g" + std::to_string(i + 1);
    d.fork(from, to);
    ASSERT_TRUE(d.truncate(to, 6).ok());
    d.append(to, {1000 + i});
    d.close(from);
  }
  const auto last = d.cache->read_dense(d.ids["g10"], 0)->k;
  EXPECT_EQ(std::memcmp(first.data(), last.data(), first.size() * sizeof(float)), 0);
  EXPECT_GE(d.cache->stats().copies, 9);
}

TEST(Cache, ASequenceThatOutgrowsItsTableRowLeavesItsNeighbourAlone) {  // O-MEM-10
  Desk d({.block_size = 4, .num_blocks = 64, .sharing = false});
  d.prefill("neighbour", tokens(100, 110));
  d.prefill("a", tokens(0, 15));
  auto both = d.step({{"a", {15}}, {"neighbour", {110}}});  // rows of 4 and 3 blocks
  both = d.step({{"a", {16}}, {"neighbour", {111}}});       // a's row is 5 blocks wide from here on
  d.expect_right("a", both["a"]);
  d.expect_right("neighbour", both["neighbour"]);
  EXPECT_EQ(d.cache->blocks_held(d.ids["neighbour"])->n, 3);
}

TEST(Cache, OddGeometriesForkAndCopy) {  // O-LIFE-10, O-NUM-09
  for (const Format format : {Format::kQ8, Format::kQ4, Format::kF16})
    for (const int64_t block_size : {1, 3}) {
      Desk d(
          {.heads_q = 1, .heads_kv = 1, .dk = 7, .dv = 5, .formats = {format, format}, .block_size = block_size});
      d.prefill("a", tokens(0, 4));
      d.fork("a", "b");
      d.expect_right("b", d.append("b", {9}));
      d.expect_right("a", d.append("a", {8}));
    }
}

TEST(Bits, AreTheSameColdAfterAHitAfterEvictionAndFromAFork) {
  for (const auto& config : kConfigs) {
    SCOPED_TRACE(text_of(config));
    Desk d({.formats = config, .num_blocks = 24, .dynamic = false});
    const auto prompt = tokens(0, 150);
    const Outputs cold = d.prefill("cold", prompt);
    EXPECT_EQ(d.reused, 0);
    d.expect_right("cold", cold);
    d.close("cold");
    EXPECT_TRUE(same_bits(d.prefill("hit", prompt), cold));
    EXPECT_EQ(d.reused, 149);
    d.close("hit");
    d.prefill("other", tokens(1000, 1000 + 24 * 16));  // takes every block
    d.close("other");
    EXPECT_TRUE(same_bits(d.prefill("evicted", prompt), cold));
    EXPECT_LT(d.reused, 149);
    ASSERT_TRUE(d.truncate("evicted", 149).ok());
    d.fork("evicted", "fork");
    EXPECT_TRUE(same_bits(d.append("fork", {149}), cold));
    EXPECT_TRUE(same_bits(d.append("evicted", {149}), cold));
    const Stats stats = d.cache->stats();
    EXPECT_GT(stats.evictions, 0);
    EXPECT_GT(stats.hit_tokens, 0);
  }
}

TEST(Bits, DoNotDependOnThreadsChunksNeighboursOrBlockOrder) {
  for (const auto& config : kConfigs) {
    SCOPED_TRACE(text_of(config));
    const auto prompt = tokens(0, 300);
    Desk plain({.formats = config, .sharing = false});
    const Outputs expected = plain.prefill("a", prompt);
    for (const int threads : {2, 3})
      for (const size_t chunk : {size_t{1}, size_t{7}, size_t{64}, size_t{1000}}) {
        Desk other({.formats = config, .sharing = false, .threads = threads});
        EXPECT_TRUE(same_bits(other.prefill("a", prompt, chunk), expected))
            << threads << " threads, chunks of " << chunk;
      }
    // In a batch of seven, over a table whose order is shuffled by earlier use, in both arenas.
    for (const ArenaOrder arena : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor}) {
      Desk busy({.formats = config, .num_blocks = 200, .sharing = false, .arena = arena, .threads = 2});
      for (int i = 0; i < 12; ++i) busy.prefill("x" + std::to_string(i), tokens(0, 40));
      for (int i = 0; i < 12; i += 2) busy.close("x" + std::to_string(i));
      busy.prefill("a", tokens(0, 299), 17);
      Desk::Batch batch = {{"x1", {5}}, {"x3", {1, 2, 3}},     {"x5", tokens(0, 20)}, {"a", {299}},
                           {"x7", {1}}, {"x9", tokens(5, 13)}, {"x11", {3}}};
      EXPECT_TRUE(same_bits(busy.step(batch)["a"], expected)) << arena_order_name(arena);
    }
  }
}

TEST(Bits, EveryInstructionSetIsRight) {
  for (const char* isa : {"scalar", "avx2", "avx512"}) {
    const GroupSpec group{.shape = {1, 8, 8, {}}, .layers = {0}};
    if (!Cache::create({.groups = {group}, .isa = isa}).ok()) continue;
    for (const auto& config : kConfigs) {
      Desk d({.formats = config, .isa = isa});
      d.prefill("a", tokens(0, 100), 33);
      d.expect_right("a", d.append("a", {5}));
      EXPECT_EQ(d.cache->isa(), isa);
    }
  }
  EXPECT_EQ(Cache::create({.groups = {{.shape = {1, 8, 8, {}}, .layers = {0}}}, .isa = "mmx"}).status().code(),
            Code::kInvalidArgument);
}

TEST(Memory, APoolOfOneBlockFollowsUseUpAndDown) {
  for (const ArenaOrder arena : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor}) {
    Desk d({.heads_q = 8,
            .heads_kv = 8,
            .dk = 128,
            .dv = 128,
            .layers = 4,
            .num_blocks = 1,
            .sharing = false,
            .arena = arena});
    const auto rule = [&] {
      const Stats s = d.cache->stats();
      EXPECT_LE(s.bytes_committed, s.bytes_in_use + s.extent_bytes);
      EXPECT_LE(s.bytes_resident, s.bytes_committed);
      return s;
    };
    const std::byte* base = d.cache->tensors(2)->k.data;
    const int64_t floor = rule().bytes_committed;
    for (int i = 0; i < 40; ++i) {
      d.prefill("s" + std::to_string(i), tokens(0, 64), 64);
      rule();
    }
    const Stats peak = rule();
    EXPECT_GT(peak.bytes_resident, 4 << 20);
    for (int i = 39; i >= 0; --i) {
      d.close("s" + std::to_string(i));
      rule();
    }
    const Stats after = rule();
    EXPECT_LT(after.bytes_resident, peak.bytes_resident / 2);
    EXPECT_LE(after.bytes_committed, floor + after.extent_bytes);
    EXPECT_GT(after.growth_events, 0);
    EXPECT_EQ(after.growth_events, after.shrink_events);
    EXPECT_EQ(after.growth_bytes_copied, 0);
    EXPECT_EQ(d.cache->tensors(2)->k.data, base);
    EXPECT_EQ(after.dense_materializations, 0);
  }
}

TEST(Memory, WithDynamicOffAFullPoolIsACapacityErrorWithNeedAndHave) {
  Desk d({.block_size = 16, .num_blocks = 8, .dynamic = false, .sharing = false});
  d.prefill("a", tokens(0, 64));
  d.start("b", tokens(0, 214));
  d.step({{"b", tokens(0, 214)}});
  EXPECT_EQ(d.last.code(), Code::kCapacity);
  EXPECT_NE(d.last.message().find("need 214 tokens (14 blocks), have 64 tokens (4 blocks)"), std::string::npos)
      << d.last.message();
  d.expect_right("a", d.append("a", {1}));
  EXPECT_EQ(d.cache->capacity(), Tokens(128));
}

TEST(Memory, AFullWindowNamesWhatMakesRoomForItsForks) {
  auto made = Cache::create({.groups = {{.shape = {1, 64, 64, {}}, .sliding_window = 64, .layers = {0}}},
                             .dynamic = false,
                             .longest_chunk = Tokens(64),
                             .prefix_sharing = false});
  ASSERT_TRUE(made.ok());
  Cache& cache = **made;
  const auto append = [&](SequenceId id, int64_t n) -> Status {
    const StepRequest request{.sequence = id, .n_tokens = Tokens(n)};
    auto plan = cache.reserve({&request, 1});
    return plan.ok() ? cache.commit(std::move(*plan)).status() : plan.status();
  };
  const SequenceId first = cache.start({})->id;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(append(first, 64).ok());
  Status status;
  for (int i = 0; i < 200 && status.ok(); ++i) status = append(cache.fork(first).value(), 1);
  EXPECT_EQ(status.code(), Code::kCapacity);
  EXPECT_NE(status.message().find("max_sequences 1, forks included, and longest_chunk 64"), std::string::npos)
      << status.message();
}

TEST(Memory, WithDynamicOnKvMemoryIsTheLimitAndIsNamed) {
  Desk d({.heads_q = 8,
          .heads_kv = 8,
          .dk = 128,
          .dv = 128,
          .layers = 4,
          .num_blocks = 1,
          .sharing = false,
          .kv_memory = Bytes(8 << 20)});
  d.start("a", {});
  d.step({{"a", tokens(0, 2000)}});
  EXPECT_EQ(d.last.code(), Code::kCapacity);
  EXPECT_NE(d.last.message().find("kv_memory 8.0 MiB"), std::string::npos) << d.last.message();
  EXPECT_TRUE(d.cache->verify().ok());
  const Stats s = d.cache->stats();
  EXPECT_LE(s.bytes_committed, s.extent_bytes * 2);  // what the failed reserve had grown went back
  d.expect_right("a", d.append("a", {1}));
}

TEST(Errors, NotFiniteRowsRejectTheirSequenceAloneWithLayerHeadAndPosition) {  // O-SHARE-14
  Desk d({.block_size = 4});
  d.prefill("good", tokens(0, 5));
  d.prefill("bad", tokens(50, 55));
  const StepRequest requests[] = {{d.ids["good"], {}, Tokens(2)}, {d.ids["bad"], {}, Tokens(2)}};
  auto plan = d.cache->reserve(requests);
  ASSERT_TRUE(plan.ok());
  std::vector<float> k(size_t(4 * d.o.heads_kv * d.o.dk), 0.5f), v = k;
  for (int layer = 0; layer < 2; ++layer) {
    if (layer == 1) k[size_t((3 * d.o.heads_kv + 1) * d.o.dk + 5)] = NAN;  // token 3 of the step, KV head 1
    ASSERT_TRUE(d.cache->append(*plan, layer, {k.data()}, {v.data()}).ok());
  }
  auto statuses = d.cache->commit(std::move(*plan));
  ASSERT_TRUE(statuses.ok());
  EXPECT_TRUE((*statuses)[0].ok());
  EXPECT_EQ((*statuses)[1].code(), Code::kNotFinite);
  for (const char* word : {"layer 1", "KV head 1", "position 6"})
    EXPECT_NE((*statuses)[1].message().find(word), std::string::npos) << (*statuses)[1].message();
  EXPECT_EQ(d.cache->length(d.ids["good"]).value(), Tokens(7));
  EXPECT_EQ(d.cache->length(d.ids["bad"]).value(), Tokens(5));
  d.expect_right("bad", d.append("bad", {9}));
  EXPECT_TRUE(d.cache->verify().ok());
}

TEST(Errors, SizesThatCannotWorkAreRefusedAtCreationWithTheirLimit) {
  const GroupSpec group{.shape = {2, 64, 64, {}}, .layers = {0}};
  const auto refused = [](CacheOptions options) {
    auto made = Cache::create(std::move(options));
    EXPECT_FALSE(made.ok());
    return made.status().message();
  };
  EXPECT_NE(refused({.groups = {group}, .block_size = Tokens(0)}).find("block_size is 0"), std::string::npos);
  EXPECT_NE(refused({.groups = {group}, .block_size = Tokens(int64_t{1} << 40)}).find("1 to 256"),
            std::string::npos);
  EXPECT_NE(refused({.groups = {group}, .num_blocks = Blocks(int64_t{1} << 31)}).find("2147483647"),
            std::string::npos);
  EXPECT_NE(refused({.groups = {group}, .num_blocks = Blocks(0)}).find("num_blocks is 0"), std::string::npos);
  EXPECT_NE(
      refused({.groups = {group}, .num_blocks = Blocks(1 << 20), .kv_memory = Bytes(1 << 20)}).find("kv_memory"),
      std::string::npos);
  EXPECT_NE(refused({}).find("no groups"), std::string::npos);
  EXPECT_NE(refused({.groups = {group, group}}).find("layer 0 is in two groups"), std::string::npos);
  EXPECT_NE(refused({.groups = {group}, .q_heads_per_kv_head = -1}).find("q_heads_per_kv_head is -1"),
            std::string::npos);
}

TEST(Errors, APlanOfAnotherCacheOrAnEndedStepIsRefused) {
  Desk a({}), b({});
  a.prefill("s", tokens(0, 4));
  const StepRequest request{a.ids["s"], {}, Tokens(1)};
  auto plan = a.cache->reserve({&request, 1});
  ASSERT_TRUE(plan.ok());
  std::vector<float> row(size_t(a.o.heads_kv * a.o.dk));
  EXPECT_EQ(b.cache->append(*plan, 0, {row.data()}, {row.data()}).code(), Code::kInvalidArgument);
  EXPECT_EQ(a.cache->append(*plan, 9, {row.data()}, {row.data()}).code(), Code::kInvalidArgument);
  EXPECT_EQ(a.cache->attend({.plan = *plan, .q = row.data(), .out = row.data()}).code(),
            Code::kInvalidArgument);  // no scratch
  plan->abandon();
  EXPECT_EQ(a.cache->append(*plan, 0, {row.data()}, {row.data()}).code(), Code::kInvalidArgument);
  EXPECT_EQ(a.cache->commit(std::move(*plan)).status().code(), Code::kInvalidArgument);
}

TEST(Errors, SizesPastWhatCanBeCountedAreRefusedWithTheLimit) {
  const GroupSpec group{.shape = {2, 64, 64, {}}, .layers = {0}};
  const auto refused = [](CacheOptions options) {
    auto made = Cache::create(std::move(options));
    EXPECT_FALSE(made.ok());
    return made.status().message();
  };
  for (const int64_t huge : {INT64_MAX, int64_t{1} << 40, kMaxTokens + 1}) {
    const std::string message = refused({.groups = {group}, .max_context = Tokens(huge)});
    EXPECT_NE(message.find("max_context is " + std::to_string(huge) + ", the limit is 2147483647"),
              std::string::npos)
        << message;
  }
  const std::string memory = refused({.groups = {group}, .kv_memory = Bytes(INT64_MAX)});
  EXPECT_NE(memory.find("kv_memory is 9223372036854775807, the limit is 140737488355328"), std::string::npos)
      << memory;

  // The largest image there is, times the most blocks: the bytes in the message do not wrap.
  GroupSpec largest{.shape = {4096, 1024, 1024, {Format::kF32, Format::kF32}}};
  for (int layer = 0; layer < 4096; ++layer) largest.layers.push_back(layer);
  const std::string bytes =
      refused({.groups = {largest}, .block_size = Tokens(256), .num_blocks = Blocks(kMaxBlocks)});
  EXPECT_EQ(bytes.find('-'), std::string::npos) << bytes;
  EXPECT_NE(bytes.find("kv_memory is "), std::string::npos) << bytes;

  Desk d({.kv_memory = Bytes(8 << 20)});
  for (const int64_t tokens : {INT64_MAX, INT64_MAX - 1, int64_t{1} << 40, d.cache->capacity().n + 1}) {
    const Status status = d.cache->grow_to_capacity(Tokens(tokens));
    EXPECT_EQ(status.code(), Code::kCapacity) << tokens;
    EXPECT_EQ(status.message().find("need -"), std::string::npos) << status.message();
  }
  EXPECT_EQ(d.cache->grow_to_capacity(Tokens(-1)).code(), Code::kInvalidArgument);
}

TEST(Memory, CapacityAndAvailableAreWhatReserveGives) {
  for (const ArenaOrder arena : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor})
    for (const int64_t mib : {3, 15, 33, 50})
      for (const int64_t num_blocks : {1, 40})
        for (const int64_t window : {0, 24}) {
          GroupSpec full{.shape = {1, 64, 64, {}}, .layers = {0, 1}};
          std::vector<GroupSpec> groups{full};
          if (window > 0) groups.push_back({.shape = full.shape, .sliding_window = window, .layers = {2}});
          auto made = Cache::create({.groups = groups,
                                     .num_blocks = Blocks(num_blocks),
                                     .kv_memory = Bytes(mib << 20),
                                     .longest_chunk = Tokens(16),
                                     .arena = arena,
                                     .prefix_sharing = false});
          const auto& cache = *made;
          const std::string what = std::string(arena_order_name(arena)) + ", " + std::to_string(mib) +
                                   " MiB, from " + std::to_string(num_blocks) + ", window " +
                                   std::to_string(window);
          const SequenceId id = cache->start({})->id;
          const auto grow = [&](int64_t tokens) {
            const StepRequest request{.sequence = id, .n_tokens = Tokens(tokens)};
            auto plan = cache->reserve({&request, 1});
            return plan.ok() ? cache->commit(std::move(*plan)).status() : plan.status();
          };
          EXPECT_EQ(cache->available(), cache->capacity()) << what;
          // A window group takes no more than its floor, chunk by chunk.
          while (cache->available().n > 0) {
            const int64_t before = cache->available().n;
            const Status status = grow(std::min<int64_t>(before, 16));
            ASSERT_TRUE(status.ok()) << what << ": " << status.message();
            ASSERT_LT(cache->available().n, before) << what;
          }
          EXPECT_EQ(cache->length(id)->n, cache->capacity().n) << what;
          EXPECT_EQ(grow(1).code(), Code::kCapacity) << what;
          EXPECT_TRUE(cache->verify().ok());
        }
}

TEST(Errors, APlanThatReadsIsStaleAfterAChangeAndNeverWrites) {
  Desk d({.block_size = 4, .sharing = false});
  d.prefill("a", tokens(0, 6));
  const ReadRequest request{d.ids["a"], Tokens(1)};
  std::vector<float> q(size_t(d.o.heads_q * d.o.dk)), out(size_t(d.o.heads_q * d.o.dv)), k = q;
  auto plan = d.cache->plan_read({&request, 1});
  ASSERT_TRUE(plan.ok());
  alignas(64) static std::byte scratch[1 << 19];
  ASSERT_LE(d.cache->scratch_bytes(*plan, 1, d.o.heads_q).n, int64_t(sizeof scratch));
  const AttendArgs args{
      .plan = *plan, .num_q_heads = d.o.heads_q, .q = q.data(), .out = out.data(), .scratch = scratch};
  EXPECT_TRUE(d.cache->attend(args).ok());
  EXPECT_TRUE(d.cache->merge(args).ok());

  // The tail is copied away beside a fork, and its block becomes another sequence's.
  d.fork("a", "b");
  EXPECT_TRUE(d.cache->attend(args).ok()) << "a fork changes nothing for its parent";
  d.append("a", {7});
  d.close("b");
  d.prefill("c", tokens(30, 34));
  EXPECT_EQ(d.cache->attend(args).code(), Code::kStale);
  EXPECT_EQ(d.cache->merge(args).code(), Code::kStale);
  EXPECT_EQ(d.cache->scratch_bytes(*plan, 1), Bytes(0));
  std::vector<float> rows(size_t(4 * 64 * d.o.heads_kv));
  const Cache::DenseRows dense{.data = rows.data(), .token_stride = 128, .head_stride = 64};
  EXPECT_EQ(d.cache->read_dense(*plan, 0, 0, Tokens(6), dense, dense).code(), Code::kStale);

  // Its arrays serve the next step, which writes.
  d.expect_right("a", d.append("a", {8}));
  d.expect_right("c", d.append("c", {9}));
}

TEST(Errors, PartsOfNothingAndPlansThatWereMovedFromAreRefused) {
  Desk d({.block_size = 4});
  d.prefill("a", tokens(0, 4));
  const StepRequest request{d.ids["a"], {}, Tokens(1)};
  auto made = d.cache->reserve({&request, 1});
  ASSERT_TRUE(made.ok());
  StepPlan plan = std::move(*made);
  std::vector<float> row(size_t(d.o.heads_q * d.o.dk));
  alignas(64) static std::byte scratch[1 << 19];
  const AttendArgs args{.plan = plan, .q = row.data(), .out = row.data(), .scratch = scratch};
  for (const Part part :
       {Part{0, 0}, Part{5, 2}, Part{2, 2}, Part{-1, 2}, Part{0, -1}, Part{INT32_MIN, INT32_MIN}}) {
    EXPECT_EQ(d.cache->append(plan, 0, {row.data()}, {row.data()}, part).code(), Code::kInvalidArgument);
    EXPECT_EQ(d.cache->attend(args, part).code(), Code::kInvalidArgument);
    EXPECT_EQ(d.cache->merge(args, part).code(), Code::kInvalidArgument);
  }
  StepPlan& moved = *made;
  EXPECT_EQ(d.cache->commit(std::move(moved)).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(d.cache->faults(moved).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(d.cache->append(moved, 0, {row.data()}, {row.data()}).code(), Code::kInvalidArgument);
  const AttendArgs of_moved{.plan = moved, .q = row.data(), .out = row.data(), .scratch = scratch};
  EXPECT_EQ(d.cache->attend(of_moved).code(), Code::kInvalidArgument);
  EXPECT_EQ(d.cache->merge(of_moved).code(), Code::kInvalidArgument);
  EXPECT_EQ(d.cache->scratch_bytes(moved, 1), Bytes(0));
  moved.abandon();
  EXPECT_EQ(moved.n_tokens() + moved.n_sequences() + std::ssize(moved.positions()), 0);

  EXPECT_TRUE(d.cache->append(plan, 0, {row.data()}, {row.data()}).ok());
  EXPECT_TRUE(d.cache->commit(std::move(plan)).ok());
}

// The stated precondition of what cannot give a Status: checked in debug builds, and never read out of bounds.
TEST(Errors, AGroupThatIsNoneOfTheCacheReadsNothing) {
  Desk d({});
  d.prefill("a", tokens(0, 4));
  const StepRequest request{d.ids["a"], {}, Tokens(1)};
  auto plan = d.cache->reserve({&request, 1});
  for (const int group : {7, -1, INT32_MAX}) {
#ifdef NDEBUG
    EXPECT_EQ(d.cache->image_bytes(group), Bytes(0));
    EXPECT_EQ(d.cache->query_path(group), QueryPath::kF32);
    EXPECT_TRUE(d.cache->block_views(group).blocks.empty());
    EXPECT_EQ(plan->group(group).max_blocks, 0);
#else
    EXPECT_DEATH(d.cache->image_bytes(group), "broken invariant");
    EXPECT_DEATH(d.cache->query_path(group), "broken invariant");
    EXPECT_DEATH(d.cache->block_views(group), "broken invariant");
    EXPECT_DEATH(plan->group(group), "broken invariant");
#endif
    EXPECT_EQ(d.cache->blocks_held(d.ids["a"], group).status().code(), Code::kInvalidArgument);
    EXPECT_EQ(d.cache->keep_committed(group).status().code(), Code::kInvalidArgument);
    EXPECT_EQ(d.cache->tensors(group).status().code(), Code::kInvalidArgument);
  }
  plan->abandon();
}

TEST(Keys, DifferWhereTheCachesDifferHoweverTheirNamesAreSpelled) {
  const GroupSpec first{.shape = {2, 64, 64, {}}, .layers = {0}};
  GroupSpec second = first;
  second.layers = {1};
  const auto key = [](std::vector<GroupSpec> groups, std::string fingerprint) {
    auto made = Cache::create({.groups = std::move(groups),
                               .num_blocks = Blocks(1),
                               .kv_memory = Bytes(64 << 20),
                               .longest_chunk = Tokens(1),
                               .fingerprint = std::move(fingerprint)});
    return (*made)->match(tokens(0, 16)).keys.front();
  };
  EXPECT_NE(key({first, second}, "m"), key({second}, "m; off 2x64:64 window 0 0"));
  EXPECT_NE(key({first, second}, "m"), key({first}, "m; off 2x64:64 window 0 1"));
  EXPECT_EQ(key({first, second}, "m"), key({first, second}, "m"));
}

// A decimal comma and grouped digits, as a host program may have set them for the whole process.
struct ForeignNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(Locale, OfTheHostChangesNeitherKeysNorJsonNorMessages) {
  const auto texts = [] {
    auto made = Cache::create({.groups = {{.shape = {1, 64, 64, {}}, .layers = {0, 1000, 2000}}},
                               .num_blocks = Blocks(3000),
                               .kv_memory = Bytes(256 << 20)});
    const auto& cache = *made;
    const SequenceId id = cache->start({})->id;
    const StepRequest request{.sequence = id, .n_tokens = Tokens(16)};
    auto plan = cache->reserve({&request, 1});
    EXPECT_TRUE(cache->commit(std::move(*plan)).ok());
    const PrefixKey key = cache->match(tokens(0, 16)).keys.front();
    return std::tuple(to_json(cache->stats()), cache->grow_to_capacity(Tokens(INT64_MAX)).message(),
                      std::vector<uint8_t>(key.bytes.begin(), key.bytes.end()));
  };
  const auto before = texts();
  const std::locale old = std::locale::global(std::locale(std::locale::classic(), new ForeignNumbers));
  const auto abroad = texts();
  std::locale::global(old);
  EXPECT_EQ(before, abroad);
}

TEST(Stats, OneSchemaCountsWhatHappened) {
  Desk d({.block_size = 4, .num_blocks = 16});
  d.prefill("a", tokens(0, 10));
  d.close("a");
  d.prefill("b", tokens(0, 10));
  const Stats s = d.cache->stats();
  EXPECT_EQ(s.blocks_free + s.blocks_open + s.blocks_full + s.blocks_shared + s.blocks_cached, s.blocks_total);
  EXPECT_EQ(s.hit_tokens, 9);
  EXPECT_EQ(s.hits_by_reason.at("last_token"), 1);
  EXPECT_EQ(s.hits_by_reason.at("new"), 10);
  EXPECT_EQ(s.dense_materializations, 0);
  EXPECT_GT(s.block_utilization, 0);
  EXPECT_LE(s.block_utilization, 1);
  EXPECT_EQ(s.kernel_calls.at("attend." + std::string(d.cache->isa())), 2 * 2);
  const std::string json = to_json(s);
  for (const char* name : {"bytes_reserved",
                           "bytes_committed",
                           "bytes_resident",
                           "bytes_in_use",
                           "blocks_total",
                           "blocks_free",
                           "blocks_open",
                           "blocks_full",
                           "blocks_shared",
                           "blocks_cached",
                           "block_utilization",
                           "tokens",
                           "alloc_events",
                           "growth_events",
                           "growth_bytes_copied",
                           "shrink_events",
                           "dense_materializations",
                           "dequantized_rows",
                           "floor_clamped_rows",
                           "saturated_values",
                           "fallbacks",
                           "kernel_calls",
                           "hits",
                           "copies"})
    EXPECT_NE(json.find("\"" + std::string(name) + "\""), std::string::npos) << name;
}

}  // namespace
}  // namespace pagedkv
