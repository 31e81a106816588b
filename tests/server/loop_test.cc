// The loop on the caller's thread, without a scheduler around it.
#include "engine/loop.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "tests/server/scripted_model.h"

namespace pagedkv::engine {
namespace {

class Listener : public RequestSink {
 public:
  void on_delta(Delta delta) override {
    text += delta.text;
    if (delta.finish) finish = delta.finish;
  }
  void on_end(const Status&, const Usage&) override { ADD_FAILURE() << "ends are told by who drives the loop"; }
  std::string text;
  std::optional<FinishReason> finish;
};

struct World {
  explicit World(const SchedulerOptions& options = {}) : loop(std::make_unique<Loop>(*model, options)) {}

  std::shared_ptr<Listener> ask(const std::string& text, int64_t max_tokens) {
    auto sink = std::make_shared<Listener>();
    ServeRequest request;
    request.prompt = *ScriptedText().tokenize(text, true, true);
    request.answer.max_tokens = Tokens(max_tokens);
    auto job = make_job(model->text(), model->context(), std::move(request), sink);
    EXPECT_TRUE(job.ok());
    (*job)->id = RequestId(++last);
    loop->accept(std::move(*job));
    return sink;
  }
  void turn() {
    loop->admit();
    loop->step();
  }

  std::unique_ptr<ScriptedModel> model = ScriptedModel::make({});
  std::unique_ptr<Loop> loop;
  uint64_t last = 0;
};

TEST(Loop, AnswersOnItsCallersThreadATokenATurn) {
  World world;
  const auto sink = world.ask("say:hello", 100);
  for (const char* text : {"h", "he", "hel", "hell", "hello"}) {
    world.turn();
    EXPECT_EQ(sink->text, text);
  }
  EXPECT_TRUE(world.loop->has_work()) << "the end is drawn in a turn of its own";
  world.turn();
  EXPECT_FALSE(world.loop->has_work());
  EXPECT_EQ(sink->finish, FinishReason::kStop);
  EXPECT_EQ(world.model->cache().stats().sequences, 0);
}

TEST(Loop, KeepsWhatEndedUntilItIsTaken) {
  World world;
  const auto first = world.ask("say:a", 1), second = world.ask("say:bcd", 3);
  while (world.loop->has_work()) world.turn();
  auto ends = world.loop->take_ends();
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(ends[0].job->sink, first);
  EXPECT_EQ(ends[1].job->sink, second);
  EXPECT_EQ(ends[1].job->usage.completion_tokens, 3);
  EXPECT_TRUE(ends[1].status.ok());
  EXPECT_FALSE(world.loop->has_ends());
  EXPECT_EQ(world.loop->open_choices(), 0);
}

TEST(Loop, ACancelledRequestEndsWellAndWithoutAFinish) {
  World world;
  const auto sink = world.ask("loop:abc", 100);
  world.turn();
  world.loop->cancel(RequestId(1));
  EXPECT_FALSE(world.loop->has_work());
  EXPECT_TRUE(world.loop->take_ends().at(0).status.ok());
  EXPECT_FALSE(sink->finish);
  EXPECT_EQ(world.loop->figures().cancelled, 1);
}

TEST(Loop, OneThatIsDroppedGivesItsBlocksBack) {
  World world;
  world.ask("loop:abc", 100);
  world.turn();
  EXPECT_EQ(world.model->cache().stats().sequences, 1);
  world.loop.reset();
  EXPECT_EQ(world.model->cache().stats().sequences, 0);
  EXPECT_TRUE(world.model->cache().verify().ok());
}

}  // namespace
}  // namespace pagedkv::engine
