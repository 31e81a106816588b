// The cache is kept between turns: the prompt of a turn is the whole conversation, and what of it was computed
// before is found in the cache. Answers go back into the prompt as the tokens they were generated as.
#include "cli/chat.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "cli/console.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/line_reader.h"
#include "cli/output.h"
#include "cli/report.h"
#include "cli/session.h"

namespace pagedkv::cli {
namespace {

using engine::ChatMessage;
using engine::FinishReason;
using engine::GenerateResult;

constexpr const char* kHelp =
    "  /help            this list\n"
    "  /stats           all counters of the cache\n"
    "  /save-text FILE  write the conversation to a new file\n"
    "  /drop            forget the oldest turn: a message and its answer\n"
    "  /clear           forget all turns\n"
    "  /quit            leave, as Ctrl-D does\n"
    "  Ctrl-C stops an answer. Any other line is a message; one that begins with / needs a space before it.\n";

void say(const std::string& text) { print_err("pagedkv: {}\n", text); }

class Chat {
 public:
  Chat(const RunOptions& options, engine::Engine& engine) : options_(options), engine_(engine), reader_("> ") {}

  int run() {
    if (!engine_.text().has_chat_template())
      return fail(Status(Code::kUnsupported, "[chat] the model has no chat template, and --interactive needs one"));
    if (options_.system)
      if (Status status = check_utf8("chat", "--system", *options_.system); !status.ok()) return fail(status);
    if (Status status = go_on(); !status.ok()) return fail(status);
    const Interrupt ctrl_c(Interrupt::Second::kIsTheSame);
    if (reader_.is_terminal()) say("/help lists the commands, Ctrl-D leaves");
    while (!left_ && written_) {
      std::string line;
      switch (reader_.read(line)) {
        case LineReader::End::kLine:
          take(line);
          break;
        case LineReader::End::kCancelled:
          if (!reader_.is_terminal()) return kExitCancelled;
          print_err("\n");
          break;
        case LineReader::End::kNoMore:
          if (reader_.is_terminal()) print_err("\n");
          left_ = true;
          break;
        case LineReader::End::kError:
          return fail(Status(Code::kUnavailable, fmt::format("[chat] stdin: {}", std::strerror(errno))));
      }
    }
    if (!written_) return finish("chat");
    return failed_ && !reader_.is_terminal() ? 1 : 0;
  }

 private:
  // Where a conversation of this name ended.
  Status go_on() {
    if (options_.session) {
      auto path = session_path(options_.engine.cache_dir->directory, *options_.session);
      if (!path.ok()) return path.status();
      auto session = load_session(*path, engine_.text());
      if (!session.ok()) return session.status();
      path_ = std::move(*path);
      session_ = std::move(*session);
      if (!session_.turns.empty())
        say(fmt::format("{} turns of \"{}\" are there; the last began: {:.60}", session_.turns.size(),
                        *options_.session, session_.turns.back().user.content));
    }
    if (options_.system) session_.system = options_.system;
    return Status();
  }

  void keep() {
    if (path_.empty()) return;
    if (Status status = save_session(path_, session_); !status.ok()) refuse(status);
  }

  void take(const std::string& line) {
    const size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string::npos) return;
    if (line[0] == '/') return command(line);
    if (Status status = check_utf8("chat", "the message", line); !status.ok()) return refuse(status);
    if (line.size() > kMaxTextBytes)
      return refuse(invalid_argument(
          fmt::format("[chat] the message has {} bytes, the limit is {}", line.size(), kMaxTextBytes)));
    answer(line.substr(begin));
  }

  // A conversation goes on after an error; only the exit code of a script remembers it.
  void refuse(const Status& status) {
    fail(status);
    failed_ = true;
  }

  // --- commands
  // ----------------------------------------------------------------------------------------------------
  void command(const std::string& line) {
    const size_t space = line.find_first_of(" \t");
    const std::string name = line.substr(0, space);
    const size_t rest = space == std::string::npos ? space : line.find_first_not_of(" \t", space);
    std::string argument = rest == std::string::npos ? "" : line.substr(rest);
    argument.resize(argument.find_last_not_of(" \t") + 1);
    if (name == "/save-text") return save_text(argument);
    if (!argument.empty()) return refuse(invalid_argument(fmt::format("[chat] {} takes no argument", name)));
    if (name == "/help") {
      print_err("{}", kHelp);
    } else if (name == "/stats") {
      print_stats(engine_.cache().stats());
    } else if (name == "/drop") {
      drop();
    } else if (name == "/clear") {
      say(fmt::format("{} turns forgotten", session_.turns.size()));
      session_.turns.clear();
      keep();
    } else if (name == "/quit") {
      left_ = true;
    } else {
      refuse(invalid_argument(fmt::format("[chat] there is no {}; /help lists the commands", name)));
    }
  }

  void drop() {
    if (session_.turns.empty()) return refuse(invalid_argument("[chat] /drop: there is no turn to forget"));
    session_.turns.erase(session_.turns.begin());
    keep();
    say(fmt::format("the oldest turn is forgotten, {} left; what follows it is computed anew",
                    session_.turns.size()));
  }

  // Plain text for people; never over a file that exists.
  void save_text(const std::string& path) {
    if (path.empty()) return refuse(invalid_argument("[chat] /save-text needs the name of a file"));
    struct Close {
      void operator()(std::FILE* file) const { std::fclose(file); }
    };
    std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "wx"));
    const auto problem = [&path] {
      return Status(Code::kUnavailable, fmt::format("[chat] /save-text {}: {}", path, std::strerror(errno)));
    };
    if (!file) return refuse(problem());
    std::string text;
    if (session_.system) text += fmt::format("system:\n{}\n\n", *session_.system);
    for (const Turn& turn : session_.turns)
      text += fmt::format("user:\n{}\n\nassistant:\n{}\n\n", turn.user.content, turn.assistant.content);
    const bool whole =
        std::fwrite(text.data(), 1, text.size(), file.get()) == text.size() && std::fflush(file.get()) == 0;
    if (!whole) return refuse(problem());
    say(fmt::format("{} turns written to {}", session_.turns.size(), path));
  }

  // --- a turn
  // ------------------------------------------------------------------------------------------------------
  void answer(const std::string& message) {
    Turn turn{.user = {"user", message}, .assistant = {"assistant", ""}};
    std::vector<ChatMessage> messages;
    if (session_.system) messages.push_back({"system", *session_.system});
    for (const Turn& before : session_.turns) messages.insert(messages.end(), {before.user, before.assistant});
    messages.push_back(turn.user);
    auto prompt = engine_.text().tokenize_chat(messages);
    if (!prompt.ok()) return refuse(prompt.status());
    if (std::ssize(*prompt) >= engine_.context().n) {
      return refuse(Status(
          Code::kCapacity,
          fmt::format("[full] with this message the conversation has {} tokens, the window has {} and must hold an "
                      "answer too: {}",
                      prompt->size(), engine_.context().n,
                      session_.turns.empty() ? "the message is too long"
                                             : "/drop forgets the oldest turn, then try again")));
    }
    engine::GenerateRequest request{
        .prompt = std::move(*prompt), .sampling = options_.sampling, .stop = options_.stop, .own_text = true};
    if (options_.max_tokens) request.max_tokens = *options_.max_tokens;

    interrupted = 0;
    const auto result = engine_.generate(request, [this](std::string_view text) {
      written_ = out(text);
      return written_ && interrupted == 0;
    });
    interrupted = 0;
    if (!result.ok()) {
      out("\n");
      return refuse(result.status());
    }
    written_ = out("\n");
    tell(*result);
    if (result->tokens_out == 0 && result->finish_reason == FinishReason::kCancelled) return;
    turn.assistant.content = result->text;
    const bool whole = engine_.text().spell(result->tokens) == result->text;  // else a stop string was cut off
    if (whole) turn.assistant.tokens = result->tokens;
    session_.turns.push_back(std::move(turn));
    keep();
  }

  void tell(const GenerateResult& result) const {
    print_err("  [{} reused, {} new; answer {} tokens, {:.1f} tok/s; {} of {} in the window]\n",
              result.tokens_reused, result.tokens_in - result.tokens_reused, result.tokens_out,
              result.decode_tok_s(), with_commas(result.tokens_in + result.tokens_out),
              with_commas(engine_.context().n));
    if (result.finish_reason == FinishReason::kCancelled) {
      say(result.tokens_out > 0 ? "[cancelled] the answer is not whole; it stays in the conversation as it is"
                                : "[cancelled] nothing was answered; the message is forgotten");
    } else if (result.finish_reason == FinishReason::kLength) {
      const bool by_option = options_.max_tokens && result.tokens_out >= options_.max_tokens->n;
      say(by_option ? fmt::format("[length] the answer was ended after {} tokens (--max-tokens)", result.tokens_out)
                    : fmt::format("[full] the window of {} tokens is full: /drop forgets the oldest turn",
                                  engine_.context().n));
    }
  }

  const RunOptions& options_;
  engine::Engine& engine_;
  LineReader reader_;
  std::string path_;  // of the session's file; empty: none
  Session session_;
  bool left_ = false;
  bool failed_ = false;
  bool written_ = true;
};

}  // namespace

int chat(const RunOptions& options, engine::Engine& engine) { return Chat(options, engine).run(); }

}  // namespace pagedkv::cli
