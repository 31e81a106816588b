// The scheduler on a scripted model, and sinks that keep what requests were told.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/scheduler.h"
#include "tests/server/scripted_model.h"

namespace pagedkv::engine {

class Collector : public RequestSink {
 public:
  void on_delta(Delta delta) override {
    const std::lock_guard lock(mutex_);
    if (std::ssize(texts_) <= delta.choice) texts_.resize(size_t(delta.choice) + 1);
    texts_[size_t(delta.choice)] += delta.text;
    if (delta.finish) finishes_.push_back(*delta.finish);
    scored_ += std::ssize(delta.tokens);
    changed_.notify_all();
  }
  void on_end(const Status& status, const Usage& usage) override {
    const std::lock_guard lock(mutex_);
    status_ = status;
    usage_ = usage;
    ended_ = true;
    place_ = places++;
    changed_.notify_all();
  }
  // The text of choice 0 once all is over.
  std::string text() {
    wait();
    return texts_.empty() ? "" : texts_[0];
  }
  void wait() {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(600), [&] { return ended_; }));
  }
  void wait_for_text(size_t n) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(600),
                                  [&] { return ended_ || (!texts_.empty() && texts_[0].size() >= n); }));
  }
  bool ended() {
    const std::lock_guard lock(mutex_);
    return ended_;
  }
  // After wait().
  const std::vector<std::string>& texts() const { return texts_; }
  const std::vector<FinishReason>& finishes() const { return finishes_; }
  const Status& status() const { return status_; }
  const Usage& usage() const { return usage_; }
  int64_t scored() const { return scored_; }
  int64_t place() const { return place_; }  // among all that end: the smaller ended first

 private:
  static inline std::atomic<int64_t> places{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_;
  std::vector<FinishReason> finishes_;
  int64_t scored_ = 0, place_ = 0;
  bool ended_ = false;
  Status status_;
  Usage usage_;
};

inline std::vector<int32_t> prompt_of(const std::string& text) {
  return *ScriptedText().tokenize(text, true, true);
}

inline ServeRequest request_of(const std::string& prompt, int64_t max_tokens = -1, int64_t n = 1) {
  ServeRequest request;
  request.prompt = prompt_of(prompt);
  request.answer.max_tokens = Tokens(max_tokens);
  request.n = n;
  return request;
}

struct World {
  explicit World(const ScriptedOptions& model_options = {}, SchedulerOptions options = {})
      : model(ScriptedModel::make(model_options)), scheduler(Scheduler::start(*model, options).value()) {}
  ~World() {
    model->hurry = true;
    model->release();
    scheduler->stop();
    EXPECT_TRUE(model->cache().verify().ok());
  }
  std::shared_ptr<Collector> ask(const std::string& text, int64_t max_tokens, int64_t n = 1,
                                 const std::string& name_space = "") {
    auto sink = std::make_shared<Collector>();
    ServeRequest request = request_of(text, max_tokens, n);
    request.name_space = name_space;
    auto id = scheduler->submit(std::move(request), sink);
    EXPECT_TRUE(id.ok()) << id.status().message();
    if (id.ok()) last = *id;
    ++asked;
    return sink;
  }
  // Figures once nothing runs any more.
  SchedulerStats idle() {
    for (int i = 0; i < 6000; ++i) {
      const SchedulerStats s = scheduler->stats();
      if (scheduler->open_requests() == 0 && s.requests >= asked && s.running == 0 && s.waiting == 0 &&
          s.finished_stop + s.finished_length + s.cancelled + s.failed == s.requests &&
          (!s.tier || s.cache.blocks_open + s.cache.blocks_full + s.cache.blocks_shared == 0))
        return s;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ADD_FAILURE() << "requests are left";
    return scheduler->stats();
  }
  void expect_no_block_is_held() {
    const SchedulerStats s = idle();
    EXPECT_EQ(s.cache.blocks_open + s.cache.blocks_full + s.cache.blocks_shared, 0);
    EXPECT_EQ(s.cache.blocks_free + s.cache.blocks_cached, s.cache.blocks_total);
    EXPECT_EQ(s.cache.sequences, 0);
  }

  std::unique_ptr<ScriptedModel> model;
  std::unique_ptr<Scheduler> scheduler;
  RequestId last{};
  int64_t asked = 0;
};

inline std::string expected(const std::string& prompt, int64_t n) {
  return ScriptedModel::answer(prompt_of(prompt), n);
}

}  // namespace pagedkv::engine
