// The scheduler on a model whose answers depend on what is really in the blocks.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <random>

#include "tests/server/scheduler_world.h"

namespace pagedkv::engine {
namespace {

TEST(Scheduler, AnswersOfABatchAreThoseOfEachAlone) {
  World world;
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 12; ++i) sinks.push_back(world.ask("prompt number " + std::to_string(i * i), 20 + i));
  for (int i = 0; i < 12; ++i)
    EXPECT_EQ(sinks[size_t(i)]->text(), expected("prompt number " + std::to_string(i * i), 20 + i));
  world.expect_no_block_is_held();
}

TEST(Scheduler, AnEndTokenIsStopAndTheLimitIsLength) {
  World world;
  auto stop = world.ask("say:hello", 100), length = world.ask("say:hello", 3);
  EXPECT_EQ(stop->text(), "hello");
  EXPECT_EQ(stop->finishes(), std::vector{FinishReason::kStop});
  EXPECT_EQ(stop->usage().completion_tokens, 5);
  EXPECT_EQ(length->text(), "hel");
  EXPECT_EQ(length->finishes(), std::vector{FinishReason::kLength});
}

TEST(Scheduler, AFullPoolPreemptsAndEveryAnswerIsStillRight) {  // O-CONC-09
  World world({.block_size = 4, .num_blocks = 8, .context = 32}, {.max_num_seqs = 3, .growth = Tokens(0)});
  std::vector<std::shared_ptr<Collector>> sinks;
  world.model->hold();
  for (const char* prompt : {"abcdefg", "hijklmn", "opqrstu"}) sinks.push_back(world.ask(prompt, 12));
  world.model->release();
  int64_t preemptions = 0;
  for (size_t i = 0; i < 3; ++i) {
    const std::string prompt(std::array{"abcdefg", "hijklmn", "opqrstu"}[i]);
    EXPECT_EQ(sinks[i]->text(), expected(prompt, 12));
    EXPECT_EQ(sinks[i]->usage().prompt_tokens, 8);
    EXPECT_EQ(sinks[i]->usage().completion_tokens, 12);
    preemptions += sinks[i]->usage().preemptions;
  }
  EXPECT_GT(preemptions, 0);
  world.expect_no_block_is_held();
}

TEST(Scheduler, APoolMuchTooSmallForTheLoadServesEverybody) {
  World world({.block_size = 4, .num_blocks = 12, .context = 48}, {.max_num_seqs = 16, .max_queue = 128});
  std::vector<std::shared_ptr<Collector>> sinks;
  std::vector<std::string> prompts;
  for (int i = 0; i < 60; ++i) prompts.push_back("load " + std::to_string(i * 7919));
  for (const std::string& prompt : prompts) sinks.push_back(world.ask(prompt, 24));
  for (size_t i = 0; i < sinks.size(); ++i) EXPECT_EQ(sinks[i]->text(), expected(prompts[i], 24));
  world.expect_no_block_is_held();
}

TEST(Scheduler, APoolMuchTooSmallIsFairToClientsThatAskAlike) {
  // Room for one request and a bit; ten clients ask for twenty times as much at any moment.
  World world({.block_size = 4, .num_blocks = 14, .context = 56, .step_seconds = 0.0005},
              {.max_num_seqs = 10, .max_queue = 100});
  constexpr int kClients = 10;
  std::atomic<int> total{0};
  std::array<int, kClients> served{};
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      while (total < 150) {
        const std::string prompt = "client " + std::to_string(c) + " turn " + std::to_string(served[size_t(c)]);
        auto sink = std::make_shared<Collector>();
        ASSERT_TRUE(world.scheduler->submit(request_of(prompt, 20), sink).ok());
        EXPECT_EQ(sink->text(), expected(prompt, 20));
        ++served[size_t(c)];
        ++total;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  const auto [least, most] = std::minmax_element(served.begin(), served.end());
  EXPECT_LE(*most, 2 * *least) << *least << " to " << *most;
}

TEST(Scheduler, SeveralChoicesShareThePromptAndAllEnd) {
  World world;
  auto sink = world.ask("a prompt of more than a block or two of tokens", 8, 4);
  sink->wait();
  ASSERT_EQ(sink->texts().size(), 4u);
  for (const std::string& text : sink->texts())
    EXPECT_EQ(text, expected("a prompt of more than a block or two of tokens", 8));
  EXPECT_EQ(sink->usage().prompt_tokens, 47);
  EXPECT_EQ(sink->usage().completion_tokens, 32);
  EXPECT_EQ(world.idle().prompt_tokens_computed, 47);  // once
}

TEST(Scheduler, ChoicesOfAPreemptedRequestAreRight) {
  World world({.block_size = 4, .num_blocks = 10, .context = 40}, {.max_num_seqs = 6, .growth = Tokens(0)});
  auto a = world.ask("first prompt", 20, 3), b = world.ask("second one", 20, 3);
  for (const auto& [sink, prompt] : {std::pair{a, "first prompt"}, std::pair{b, "second one"}}) {
    sink->wait();
    ASSERT_TRUE(sink->status().ok()) << sink->status().message();
    ASSERT_EQ(sink->texts().size(), 3u);
    for (const std::string& text : sink->texts()) EXPECT_EQ(text, expected(prompt, 20));
  }
  EXPECT_GT(world.idle().preemptions, 0);
}

TEST(Scheduler, ACommonPrefixOfRequestsAtOneMomentIsComputedOnce) {
  const std::string common(160, 'p');
  World world({.num_blocks = 256, .token_seconds = 0.0002}, {.max_num_seqs = 8});
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 8; ++i) sinks.push_back(world.ask(common + std::to_string(i), 4));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(sinks[size_t(i)]->text(), expected(common + std::to_string(i), 4));
  const SchedulerStats s = world.idle();
  EXPECT_LE(s.prompt_tokens_computed, 160 + 8 * 16);
  EXPECT_GE(s.prompt_tokens_cached, 7 * 160);
}

TEST(Scheduler, ARepeatedPromptComputesOneBlockAndATokenAtMost) {
  World world({.num_blocks = 256});
  const std::string prompt(300, 'q');
  EXPECT_EQ(world.ask(prompt, 3)->text(), expected(prompt, 3));
  const int64_t before = world.idle().prompt_tokens_computed;
  auto again = world.ask(prompt, 3);
  EXPECT_EQ(again->text(), expected(prompt, 3));
  EXPECT_GE(again->usage().cached_tokens, 301 - 17);
  EXPECT_LE(world.idle().prompt_tokens_computed - before, 17);
}

TEST(Scheduler, NamespacesShareNothing) {
  World world;
  const std::string prompt(100, 'n');
  world.ask(prompt, 2, 1, "a")->wait();
  auto other = world.ask(prompt, 2, 1, "b");
  EXPECT_EQ(other->text(), expected(prompt, 2));
  EXPECT_EQ(other->usage().cached_tokens, 0);
}

TEST(Scheduler, CancellingARunningRequestFreesItsBlocksAtOnce) {  // O-CONC-01, -04
  World world({.context = 400, .step_seconds = 0.01});
  for (const int64_t n : {1, 3}) {
    auto sink = world.ask("goes on and on", -1, n);
    sink->wait_for_text(5);
    world.scheduler->cancel(world.last);
    sink->wait();
    EXPECT_TRUE(sink->status().ok());
    EXPECT_TRUE(sink->finishes().empty());
    world.expect_no_block_is_held();
  }
  EXPECT_EQ(world.idle().cancelled, 2);
}

TEST(Scheduler, CancellingDuringPrefillStopsIt) {  // O-CONC-02
  World world({.num_blocks = 256, .context = 2048}, {.max_num_seqs = 4, .max_num_batched_tokens = Tokens(64)});
  world.model->hold();
  auto sink = world.ask(std::string(1990, 'z'), 4);
  while (world.model->tokens == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  world.scheduler->cancel(world.last);
  world.model->release();
  sink->wait();
  EXPECT_EQ(world.model->tokens, 64);
  world.expect_no_block_is_held();
}

TEST(Scheduler, CancellingAQueuedRequestLeavesTheRunningOneAlone) {  // O-CONC-03
  World world({.context = 400}, {.max_num_seqs = 1});
  world.model->hold();
  auto first = world.ask("the one that runs", 200), second = world.ask("the one that waits", 10);
  world.scheduler->cancel(world.last);
  world.model->release();
  second->wait();
  EXPECT_EQ(second->usage().completion_tokens, 0);
  EXPECT_EQ(first->text(), expected("the one that runs", 200));
  EXPECT_EQ(world.idle().waiting, 0);
}

TEST(Scheduler, AFullQueueRefusesAndNothingElseIsHurt) {  // O-CONC-06
  World world({}, {.max_num_seqs = 1, .max_queue = 4});
  world.model->hold();
  std::vector<std::shared_ptr<Collector>> accepted;
  int refused = 0;
  for (int i = 0; i < 10; ++i) {
    auto sink = std::make_shared<Collector>();
    auto id = world.scheduler->submit(request_of("q" + std::to_string(i), 3), sink);
    if (id.ok()) {
      accepted.push_back(sink);
    } else {
      EXPECT_EQ(id.status().code(), Code::kCapacity);
      ++refused;
    }
  }
  world.model->release();
  EXPECT_EQ(accepted.size(), 5u);
  EXPECT_EQ(refused, 5);
  for (size_t i = 0; i < accepted.size(); ++i) EXPECT_EQ(accepted[i]->text(), expected("q" + std::to_string(i), 3));
  EXPECT_EQ(world.idle().refused, 5);
}

TEST(Scheduler, APromptThatCannotFitIsRefusedAndTheNextIsServed) {  // O-CONC-07
  World world({.block_size = 4, .num_blocks = 10, .context = 40});
  const auto refused = world.scheduler->submit(request_of(std::string(49, 'b')), std::make_shared<Collector>());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("50"), std::string::npos);
  EXPECT_NE(refused.status().message().find("40"), std::string::npos);
  EXPECT_EQ(world.ask("abc", 4)->text(), expected("abc", 4));
}

TEST(Scheduler, LargeRequestsAreNotPassedForEver) {
  World world({.block_size = 4, .num_blocks = 32, .context = 128, .step_seconds = 0.01},
              {.max_num_seqs = 8, .max_queue = 1000, .growth = Tokens(4)});
  auto running = world.ask("runs first", 60);
  running->wait_for_text(2);
  world.model->hold();
  auto large = world.ask(std::string(90, 'L'), 10);
  std::vector<std::shared_ptr<Collector>> small;
  for (int i = 0; i < 60; ++i) small.push_back(world.ask("s" + std::to_string(i), 12));
  world.model->release();
  large->wait();
  for (size_t i = 0; i < small.size(); ++i) EXPECT_EQ(small[i]->text(), expected("s" + std::to_string(i), 12));
  const auto passed =
      std::ranges::count_if(small, [&](const auto& sink) { return sink->place() < large->place(); });
  EXPECT_LT(passed, 30);  // it had its turn before most of what came later
}

TEST(Scheduler, PromptsAreCutSoThatStepsStayShortWhileAnswersGrow) {
  World world({.num_blocks = 1024, .context = 8192, .token_seconds = 0.0005},
              {.max_num_seqs = 4, .max_num_batched_tokens = Tokens(512), .max_step_seconds = 0.03});
  auto answer = world.ask("short", -1);
  answer->wait_for_text(5);
  world.ask(std::string(700, 'x'), 1)->wait();  // what a token costs is learned from the first chunk
  world.model->largest_step = 0;
  world.ask(std::string(1500, 'y'), 1)->wait();
  EXPECT_LE(world.model->largest_step, 70);  // 60 of them take the 0.03 s
  EXPECT_GT(world.model->largest_step, 1);
  EXPECT_FALSE(answer->ended());
}

TEST(Scheduler, PromptsAloneAreNotCut) {
  World world({.num_blocks = 256, .context = 2048, .token_seconds = 0.0001}, {.max_step_seconds = 0.001});
  world.ask(std::string(700, 'x'), 1)->wait();
  EXPECT_EQ(world.model->largest_step, 512);
}

TEST(Scheduler, LogProbabilitiesComeWithEachToken) {
  World world;
  auto sink = std::make_shared<Collector>();
  ServeRequest request = request_of("say:four");
  request.top_logprobs = 5;
  ASSERT_TRUE(world.scheduler->submit(std::move(request), sink).ok());
  EXPECT_EQ(sink->text(), "four");
  EXPECT_EQ(sink->scored(), 4);
}

TEST(Scheduler, WhatGoesWrongInOneAnswerEndsItsRequestAndNoOther) {
  for (const char* fault : {"dead end", "throws"})
    for (const int64_t n : {1, 3}) {
      World world;
      world.model->hold();
      auto before = world.ask("prompt number 1", 30);
      ServeRequest bad = request_of("prompt number 2", 30, n);
      bad.answer.sampling.grammar = fault;
      auto sink = std::make_shared<Collector>();
      ASSERT_TRUE(world.scheduler->submit(bad, sink).ok());
      ++world.asked;
      auto after = world.ask("prompt number 3", 30, 2);
      world.model->release();
      EXPECT_EQ(before->text(), expected("prompt number 1", 30));
      EXPECT_EQ(after->text(), expected("prompt number 3", 30));
      EXPECT_EQ(after->texts().at(1), expected("prompt number 3", 30));
      EXPECT_EQ(sink->text(), expected("prompt number 2", 3)) << "what it had said";
      EXPECT_EQ(sink->status().code(), std::string(fault) == "throws" ? Code::kInternal : Code::kInvalidArgument);
      EXPECT_TRUE(world.scheduler->health().ok());
      EXPECT_EQ(world.ask("prompt number 4", 5)->text(), expected("prompt number 4", 5));
      EXPECT_EQ(world.idle().failed, 1);
      world.expect_no_block_is_held();
    }
}

// A sink is the product's own code, and it may fail, too.
TEST(Scheduler, ASinkThatThrowsLosesItsOwnRequest) {
  class Thrower : public RequestSink {
   public:
    void on_delta(Delta) override { throw std::runtime_error("no delta, please"); }
    void on_end(const Status& status, const Usage&) override {
      ended = true;
      why = status.message();
      throw std::runtime_error("nor an end");
    }
    std::atomic<bool> ended{false};
    std::string why;
  };
  World world;
  auto good = world.ask("prompt number 1", 30);
  auto sink = std::make_shared<Thrower>();
  ASSERT_TRUE(world.scheduler->submit(request_of("prompt number 2", 30), sink).ok());
  ++world.asked;
  EXPECT_EQ(good->text(), expected("prompt number 1", 30));
  EXPECT_EQ(world.idle().failed, 1);
  EXPECT_TRUE(sink->ended);
  EXPECT_NE(sink->why.find("no delta, please"), std::string::npos);
  EXPECT_TRUE(world.scheduler->health().ok());
}

TEST(Scheduler, ARequestThatWaitsForRoomAsksForItsPrefixOnceAndKeepsIt) {
  World world({.block_size = 4, .num_blocks = 20, .context = 72}, {.max_num_seqs = 4, .growth = Tokens(8)});
  const std::string prompt(40, 'p');
  world.ask(prompt, 2)->wait();  // its blocks stay cached
  const SchedulerStats warm = world.idle();
  world.model->hold();
  auto running = world.ask("loop:abcdefghi", 10);  // leaves what is cached, and no room beside it
  auto waiting = world.ask(prompt + "q", 4);
  world.model->release();
  EXPECT_EQ(waiting->text(), expected(prompt + "q", 4));
  running->wait();
  const SchedulerStats s = world.idle();
  EXPECT_EQ(waiting->usage().cached_tokens, 40);
  EXPECT_EQ(s.cache.hit_tokens - warm.cache.hit_tokens, 40) << "each prompt is looked up once";
  EXPECT_LE(s.cache.copies - warm.cache.copies, 2) << "and its last block copied once";
  EXPECT_EQ(s.preemptions, 0);
  world.expect_no_block_is_held();
}

TEST(Scheduler, ARecomputeIsNoHit) {
  World world({.block_size = 4, .num_blocks = 8, .context = 32}, {.max_num_seqs = 3, .growth = Tokens(0)});
  std::vector<std::shared_ptr<Collector>> sinks;
  world.model->hold();
  for (const char* prompt : {"abcdefg", "hijklmn", "opqrstu"}) sinks.push_back(world.ask(prompt, 12));
  world.model->release();
  for (const auto& sink : sinks) sink->wait();
  const SchedulerStats s = world.idle();
  EXPECT_GT(s.preemptions, 0);
  EXPECT_EQ(s.cache.hit_tokens, 0) << "no prompt was there before";
  int64_t asked = 0;
  for (const auto& [reason, tokens] : s.cache.hits_by_reason) asked += tokens;
  EXPECT_EQ(asked, 3 * 8) << "each prompt counts once";
}

TEST(Scheduler, TheFiguresHoldAnAnswerOnceItsEndIsTold) {
  class Asker : public RequestSink {
   public:
    void on_delta(Delta) override {}
    void on_end(const Status&, const Usage& usage) override {
      seen = scheduler->stats();
      open = scheduler->open_requests();
      completion_tokens = usage.completion_tokens;
      ended = true;
      ended.notify_all();
    }
    Scheduler* scheduler = nullptr;
    SchedulerStats seen;
    int64_t open = -1, completion_tokens = 0;
    std::atomic<bool> ended{false};
  };
  World world;
  for (int64_t i = 1; i <= 20; ++i) {
    auto sink = std::make_shared<Asker>();
    sink->scheduler = world.scheduler.get();
    ASSERT_TRUE(world.scheduler->submit(request_of("prompt number " + std::to_string(i), 5), sink).ok());
    sink->ended.wait(false);
    EXPECT_EQ(sink->seen.finished_length, i);
    EXPECT_EQ(sink->seen.generated_tokens, 5 * i);
    EXPECT_EQ(sink->seen.requests, i);
    EXPECT_EQ(sink->seen.running, 0);
    EXPECT_EQ(sink->open, 0);
    EXPECT_EQ(sink->seen.cache.sequences, 0);
  }
}

TEST(Scheduler, ACrashOfTheEngineEndsEveryRequestAndIsTold) {  // O-MET-06
  World world({.step_seconds = 0.01});
  auto sink = world.ask("runs", -1);
  sink->wait_for_text(3);
  auto crash = world.ask("crash:", 5);
  crash->wait();
  sink->wait();
  EXPECT_EQ(crash->status().code(), Code::kInternal);
  EXPECT_FALSE(sink->status().ok());
  EXPECT_FALSE(world.scheduler->health().ok());
  const auto late = world.scheduler->submit(request_of("x"), std::make_shared<Collector>());
  EXPECT_EQ(late.status().code(), Code::kUnavailable);
}

TEST(Scheduler, StopEndsWhatRunsAndWhatWaits) {
  World world({.step_seconds = 0.01}, {.max_num_seqs = 1});
  auto running = world.ask("runs", -1), waiting = world.ask("waits", -1);
  running->wait_for_text(2);
  world.scheduler->stop();
  running->wait();
  waiting->wait();
  EXPECT_EQ(running->status().code(), Code::kUnavailable);
  EXPECT_EQ(waiting->status().code(), Code::kUnavailable);
}

TEST(Scheduler, RandomCancelsLeaveNothingBehind) {  // O-MET-03, -04, O-CONC-05 without a disk
  World world({.block_size = 4, .num_blocks = 40, .context = 120}, {.max_num_seqs = 6, .max_queue = 1000});
  std::mt19937 random(11);
  std::vector<std::pair<RequestId, std::shared_ptr<Collector>>> open;
  for (int i = 0; i < 400; ++i) {
    auto sink = world.ask(std::string(random() % 40 + 1, char('a' + random() % 3)), int64_t(random() % 40 + 1),
                          int64_t(random() % 3 + 1));
    open.emplace_back(world.last, sink);
    if (random() % 2 == 0) world.scheduler->cancel(open[random() % open.size()].first);
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
  }
  for (auto& [id, sink] : open) sink->wait();
  world.expect_no_block_is_held();
  const SchedulerStats s = world.idle();
  EXPECT_EQ(s.finished_stop + s.finished_length + s.cancelled, 400);
  EXPECT_EQ(s.failed, 0);
}

TEST(Scheduler, RequestsFromSeveralThreadsAreServed) {
  World world({}, {.max_queue = 1000});
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        const std::string prompt = "t" + std::to_string(t) + " i" + std::to_string(i);
        auto sink = std::make_shared<Collector>();
        const auto id = world.scheduler->submit(request_of(prompt, 6), sink);
        if (i % 5 == 4) world.scheduler->cancel(*id);
        static_cast<void>(world.scheduler->stats(true));
        right += sink->text() == expected(prompt, 6) || i % 5 == 4;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 80);
}

}  // namespace
}  // namespace pagedkv::engine
