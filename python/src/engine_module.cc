// The extension module `pagedkv._engine`: GGUF models behind the engine's scheduler, for pagedkv.LLM.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "engine/engine.h"
#include "engine/scheduler.h"
#include "errors.h"
#include "options.h"
#include "pagedkv/disk_tier.h"

// Where the reader of options looks for it: beside its type.
namespace pagedkv::engine {
static void read(const python::Argument& argument, ProductsChoice& into) {
  std::string word;
  python::read(argument, word);
  into = python::check(parse_products_choice(word));
}
}  // namespace pagedkv::engine

namespace pagedkv::python {
namespace {

// What the scheduler's thread says about one request, until Python asks. Its calls never wait for Python.
class Inbox : public engine::RequestSink {
 public:
  void on_delta(engine::Delta delta) override {
    {
      const std::scoped_lock lock(mutex_);
      deltas_.push_back(std::move(delta));
    }
    changed_.notify_one();
  }
  void on_end(const Status& status, const engine::Usage& usage) override {
    {
      const std::scoped_lock lock(mutex_);
      status_ = status;
      usage_ = usage;
    }
    changed_.notify_one();
  }

  // The next delta; nothing once the request has ended. Waits without the GIL, and gives signals a chance.
  std::optional<engine::Delta> next() {
    for (;;) {
      {
        const NoGil released;
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, std::chrono::milliseconds(100), [this] { return !deltas_.empty() || usage_; });
        if (!deltas_.empty()) {
          engine::Delta delta = std::move(deltas_.front());
          deltas_.pop_front();
          return delta;
        }
        if (usage_) return std::nullopt;
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }
  Status status() const {
    const std::scoped_lock lock(mutex_);
    return status_;
  }
  std::optional<engine::Usage> usage() const {
    const std::scoped_lock lock(mutex_);
    return usage_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<engine::Delta> deltas_;
  Status status_;
  std::optional<engine::Usage> usage_;  // set: ended
};

struct Model;
// With the GIL. Never destroyed: a thread that stays behind keeps its model.
struct Process {
  std::set<Model*> models;
  bool leaving = false;     // the interpreter ends:
  std::thread::id at_exit;  // what is left of the program runs here, and every other thread stays where it is
};
Process& process() {
  static auto* process = new Process;
  return *process;
}
bool stays_behind() { return process().leaving && std::this_thread::get_id() != process().at_exit; }

struct Model {
  std::unique_ptr<engine::Engine> engine;
  std::unique_ptr<engine::Scheduler> scheduler;  // goes first
  const int forks = n_forks();

  Model() { process().models.insert(this); }
  Model(const Model&) = delete;
  ~Model() {
    process().models.erase(this);
    if (is_copy()) {  // their threads, and who held their locks, are in the other process
      (void)scheduler.release();
      (void)engine.release();
      return;
    }
    without_gil([this] {
      scheduler.reset();
      engine.reset();
    });
  }
  // This process was forked off the one that loaded the model.
  bool is_copy() const { return forks != n_forks(); }
  // Requires: the GIL.
  void check_usable() const {
    if (stays_behind()) without_gil([] { stay(); });
    if (is_copy())
      raise(
          Status(Code::kUnavailable,
                 "[LLM] the model was loaded before this process was forked, and the thread that runs it is in the "
                 "other process: load it here, or start processes by spawn"));
  }
  void stop() {
    if (scheduler == nullptr || is_copy()) return;
    without_gil([this] {
      scheduler->stop();
      engine->close_tier();
    });
  }
};

// Ends all models' threads: static objects go next, which they might use. Theirs who wait for answers stay.
void leave() {
  process().leaving = true;
  process().at_exit = std::this_thread::get_id();
  for (Model* model : std::vector(process().models.begin(), process().models.end())) model->stop();
}

struct Request {
  std::shared_ptr<Model> model;
  std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
  engine::RequestId id{};
  bool ended = false;
  Request() = default;
  Request(Request&&) = default;
  ~Request() {
    if (model && !ended) cancel();
  }
  void cancel() {
    if (!model->is_copy()) model->scheduler->cancel(id);
  }
};

struct LoadArgs {
  engine::EngineOptions engine{.max_sequences = 8};
  int64_t max_queue = 1024;
  std::string cache_dir;  // empty: none
  Bytes cache_disk = DiskTierOptions().budget;
  nb::object progress = nb::none();
};
constexpr Field<LoadArgs> kLoadFields[] = {
    {"kv_quant", &field<&LoadArgs::engine, &engine::EngineOptions::kv_formats>},
    {"context", &field<&LoadArgs::engine, &engine::EngineOptions::context>},
    {"threads", &field<&LoadArgs::engine, &engine::EngineOptions::threads>},
    {"block_size", &field<&LoadArgs::engine, &engine::EngineOptions::block_size>},
    {"num_blocks", &field<&LoadArgs::engine, &engine::EngineOptions::num_blocks>},
    {"kv_memory", &field<&LoadArgs::engine, &engine::EngineOptions::kv_memory>},
    {"dynamic", &field<&LoadArgs::engine, &engine::EngineOptions::dynamic>},
    {"chunk", &field<&LoadArgs::engine, &engine::EngineOptions::chunk>},
    {"max_num_seqs", &field<&LoadArgs::engine, &engine::EngineOptions::max_sequences>},
    {"max_queue", &field<&LoadArgs::max_queue>},
    {"query_path", &field<&LoadArgs::engine, &engine::EngineOptions::query_path>},
    {"products", &field<&LoadArgs::engine, &engine::EngineOptions::products>},
    {"reproducible", &field<&LoadArgs::engine, &engine::EngineOptions::reproducible>},
    {"cache_dir", &field<&LoadArgs::cache_dir>},
    {"cache_disk", &field<&LoadArgs::cache_disk>},
    {"cache_min_prefix", &field<&LoadArgs::engine, &engine::EngineOptions::tier, &engine::TierUse::min_prefix>},
    {"progress", &field<&LoadArgs::progress>},
};

std::shared_ptr<Model> load(const std::string& path, const nb::kwargs& given) {
  LoadArgs args;
  read_options("LLM", given, kLoadFields, args);
  engine::EngineOptions& options = args.engine;
  options.model_path = path;
  if (!args.cache_dir.empty())
    check(without_gil([&] {
      return engine::use_folder({.directory = args.cache_dir, .budget = args.cache_disk}, options.tier);
    }));
  const nb::object& progress = args.progress;
  bool interrupted = false;
  if (!progress.is_none())
    options.progress = [&](double fraction) {
      const nb::gil_scoped_acquire acquire;
      if (interrupted) return;
      try {
        progress(fraction);
      } catch (nb::python_error& error) {  // raised again once the model is there: loading cannot stop half way
        interrupted = true;
        error.restore();
      }
    };
  auto model = std::make_shared<Model>();
  auto engine = without_gil([&] { return engine::Engine::load(options); });
  if (interrupted) throw nb::python_error();
  model->engine = check(std::move(engine));
  model->scheduler = check(engine::Scheduler::start(*model->engine, {.max_num_seqs = options.max_sequences,
                                                                     .max_num_batched_tokens = options.chunk,
                                                                     .max_queue = args.max_queue}));
  warn_of_notices();
  return model;
}

using engine::AnswerOptions;
using engine::SamplingOptions;
using engine::ServeRequest;
template <auto member>
void sampling(ServeRequest& request, const Argument& argument) {
  field<&ServeRequest::answer, &AnswerOptions::sampling, member>(request, argument);
}
constexpr Field<ServeRequest> kRequestFields[] = {
    {"max_tokens",
     [](ServeRequest& request, const Argument& argument) {
       request.answer.max_tokens = Tokens(argument.value.is_none() ? -1 : whole(argument, -1));
     }},
    {"temperature", &sampling<&SamplingOptions::temperature>},
    {"top_k", &sampling<&SamplingOptions::top_k>},
    {"top_p", &sampling<&SamplingOptions::top_p>},
    {"min_p", &sampling<&SamplingOptions::min_p>},
    {"repeat_penalty", &sampling<&SamplingOptions::repeat_penalty>},
    {"presence_penalty", &sampling<&SamplingOptions::presence_penalty>},
    {"frequency_penalty", &sampling<&SamplingOptions::frequency_penalty>},
    {"logit_bias", &sampling<&SamplingOptions::logit_bias>},
    {"seed",
     [](ServeRequest& request, const Argument& argument) {
       if (argument.value.is_none())
         request.answer.sampling.seed = uint64_t(std::random_device()()) << 32 | std::random_device()();
       else
         read(argument, request.answer.sampling.seed);
     }},
    {"grammar", &sampling<&SamplingOptions::grammar>},
    {"stop",
     [](ServeRequest& request, const Argument& argument) {
       if (PyUnicode_Check(argument.value.ptr()))
         read(argument, request.answer.stop.emplace_back());
       else
         read(argument, request.answer.stop);
     }},
    {"ignore_end", &field<&ServeRequest::answer, &AnswerOptions::ignore_end>},
    {"own_text", &field<&ServeRequest::answer, &AnswerOptions::own_text>},
    {"n", &field<&ServeRequest::n>},
    {"name_space", &field<&ServeRequest::name_space>},
};

// An answer of no tokens: what can be wrong with it is checked, and nothing is computed.
Status answer_nothing(const Model& model, const ServeRequest& asked, engine::RequestSink& sink) {
  const engine::Text& text = model.engine->text();
  if (Status s = engine::check_prompt(asked.prompt, model.engine->context(), text.vocab_size()); !s.ok()) return s;
  if (const auto sampler = text.make_sampler(asked.answer.sampling); !sampler.ok()) return sampler.status();
  if (const int64_t most = model.scheduler->max_choices(); asked.n < 1 || asked.n > most)
    return invalid_argument("n is " + std::to_string(asked.n) + ", allowed are 1 to " + std::to_string(most));
  for (int64_t choice = 0; choice < asked.n; ++choice)
    sink.on_delta({.choice = choice, .finish = engine::FinishReason::kLength});
  sink.on_end(Status(), {.prompt_tokens = std::ssize(asked.prompt)});
  return Status();
}

Request submit(const std::shared_ptr<Model>& model, nb::handle prompt, const nb::kwargs& given) {
  model->check_usable();
  Request request;
  ServeRequest asked;
  read({"prompt", prompt}, asked.prompt);
  read_options("generate", given, kRequestFields, asked);
  if (asked.answer.max_tokens.n == 0) {
    check(answer_nothing(*model, asked, *request.inbox));
    request.model = model;
    return request;
  }
  request.id = check(without_gil([&] { return model->scheduler->submit(std::move(asked), request.inbox); }));
  request.model = model;
  return request;
}

nb::object next(Request& request) {
  request.model->check_usable();
  const std::optional<engine::Delta> delta = request.inbox->next();
  request.model->check_usable();
  if (!delta) {
    request.ended = true;
    check(request.inbox->status());
    return nb::none();
  }
  return nb::make_tuple(
      delta->choice, nb::str(delta->text.c_str(), delta->text.size()),
      delta->finish ? nb::object(nb::str(engine::finish_reason_name(*delta->finish))) : nb::none());
}

nb::dict usage(const Request& request) {
  nb::dict out;
  const auto usage = request.inbox->usage();
  if (!usage) return out;
  out["prompt_tokens"] = usage->prompt_tokens;
  out["cached_tokens"] = usage->cached_tokens;
  out["reason"] = prefix_reason_name(usage->reason);
  out["completion_tokens"] = usage->completion_tokens;
  out["preemptions"] = usage->preemptions;
  out["queue_seconds"] = usage->queue_seconds;
  out["first_token_seconds"] = usage->first_token_seconds;
  out["total_seconds"] = usage->total_seconds;
  return out;
}

nb::dict stats(const Model& model) {
  model.check_usable();
  const engine::SchedulerStats s = model.scheduler->stats();
  nb::dict out;
  out["cache"] = from_json(to_json(s.cache));
  for (const auto& [name, value] : engine::named_counts(s)) out[name] = value;
  for (const auto& [name, value] : engine::named_seconds(s)) out[name] = value;
  if (s.tier) {
    nb::dict tier;
    tier["bytes"] = s.tier->tier.bytes;
    tier["blocks"] = s.tier->tier.blocks;
    for (const auto& [name, value] : engine::named_counts(*s.tier)) tier[name] = value;
    out["tier"] = tier;
  }
  return out;
}

std::vector<engine::ChatMessage> messages_of(nb::handle messages) {
  std::vector<engine::ChatMessage> out;
  if (!PySequence_Check(messages.ptr())) refuse_type({"messages", messages}, "texts (str) and lists of messages");
  for (const nb::handle item : nb::borrow(messages)) {
    nb::dict message;
    if (!nb::try_cast(nb::borrow(item), message) || !message.contains("role") || !message.contains("content"))
      raise_type_error("a message is a dict with role and content, both strings");
    engine::ChatMessage read;
    if (!nb::try_cast(nb::object(message["role"]), read.role) ||
        !nb::try_cast(nb::object(message["content"]), read.content))
      raise_type_error("a message's role and content are strings");
    out.push_back(std::move(read));
  }
  return out;
}

}  // namespace
}  // namespace pagedkv::python

NB_MODULE(_engine, m) {
  using namespace pagedkv;
  using namespace pagedkv::python;
  namespace nb = nanobind;
  m.doc() = "GGUF models on the paged cache: use pagedkv.LLM.";
  take_notices();
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&leave));
  nb::class_<Request>(m, "Request")
      .def("next", &next, "(choice, text, finish reason or None), or None once the request has ended.")
      .def("cancel", &Request::cancel)
      .def("usage", &usage);
  nb::class_<Model>(m, "Model")
      .def("submit", &submit, nb::arg("prompt"), nb::arg("options"))
      .def(
          "tokenize",
          [](const Model& model, nb::handle given, nb::handle add_special, nb::handle parse_special) {
            std::string text;
            bool special = true, parsed = false;
            read({"text", given}, text);
            read({"add_special", add_special}, special);
            read({"parse_special", parse_special}, parsed);
            return check(without_gil([&] { return model.engine->text().tokenize(text, special, parsed); }));
          },
          nb::arg("text").none(), nb::arg("add_special").none(), nb::arg("parse_special").none())
      .def(
          "detokenize",
          [](const Model& model, nb::handle given) {
            std::vector<int32_t> tokens;
            read({"tokens", given}, tokens);
            for (const int32_t token : tokens) {
              if (token < 0 || token >= model.engine->text().vocab_size())
                raise(invalid_argument("token " + std::to_string(token) + ", the vocabulary has " +
                                       std::to_string(model.engine->text().vocab_size())));
            }
            engine::TextStream stream;  // bytes that are no characters become U+FFFD
            const std::string text = stream.push(model.engine->text().spell(tokens));
            return text + stream.finish();
          },
          nb::arg("tokens").none())
      .def(
          "tokenize_chat",
          [](const Model& model, nb::handle messages) {
            const std::vector<engine::ChatMessage> read = messages_of(messages);
            return check(without_gil([&] { return model.engine->text().tokenize_chat(read); }));
          },
          nb::arg("messages").none())
      .def("default_system", [](const Model& model) { return model.engine->text().default_system(); })
      .def("stats", &stats)
      .def("close", &Model::stop)
      .def_prop_ro("info", [](const Model& model) {
        const engine::ModelInfo& info = model.engine->model();
        nb::dict out;
        out["path"] = info.path;
        out["architecture"] = info.architecture;
        out["name"] = info.name;
        out["n_layers"] = info.n_layers;
        out["vocab_size"] = info.vocab_size;
        out["context_length"] = info.context_length;
        out["weight_bytes"] = info.weight_bytes;
        out["context"] = model.engine->context().n;
        out["threads"] = model.engine->threads();
        out["kv_quant"] = kv_quant_name(model.engine->cache_options().groups.front().shape.formats);
        out["isa"] = std::string(model.engine->cache().isa());
        out["query_path"] = query_path_name(model.engine->cache().query_path());
        const engine::ProductsInfo products = model.engine->products();
        out["products"] = products.n_own > 0 ? products.isa : "ggml";
        out["own_products"] = products.n_own;
        out["ggml_products"] = products.n_ggml;
        return out;
      });
  m.def("load", &load, nb::arg("path"), nb::arg("options"));
}
