#include "server/metrics.h"

#include <cmath>
#include <cstdio>
#include <string_view>
#include <vector>

namespace pagedkv::server {
namespace {

std::string number(double value) {
  char text[40];
  // Counts of any size are whole: a rate over rounded ones would jump.
  const bool whole = std::floor(value) == value && std::abs(value) < 9e15;
  std::snprintf(text, sizeof text, whole ? "%.0f" : "%.9g", value);
  return text;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

using Labels = std::vector<std::pair<std::string, std::string>>;

class Writer {
 public:
  void family(const char* name, const char* type, const char* help) {
    name_ = std::string("pagedkv_") + name;
    text_ += "# HELP " + name_ + " " + help + "\n# TYPE " + name_ + " " + type + "\n";
  }
  void sample(double value, const Labels& labels = {}, const char* suffix = "") {
    text_ += name_ + suffix;
    for (size_t i = 0; i < labels.size(); ++i)
      text_ += (i == 0 ? "{" : ",") + labels[i].first + "=\"" + escaped(labels[i].second) + "\"";
    if (!labels.empty()) text_ += "}";
    text_ += " " + number(value) + "\n";
  }
  void one(const char* name, const char* type, const char* help, double value) {
    family(name, type, help);
    sample(value);
  }
  void one(const char* name, const char* type, const char* help, int64_t value) {
    one(name, type, help, double(value));
  }
  void histogram(const char* name, const char* help, const engine::Histogram& h) {
    family(name, "histogram", help);
    int64_t count = 0;
    for (size_t i = 0; i < h.counts.size(); ++i) {
      count += h.counts[i];
      sample(double(count), {{"le", i < h.bounds.size() ? number(h.bounds[i]) : "+Inf"}}, "_bucket");
    }
    sample(h.sum, {}, "_sum");
    sample(double(count), {}, "_count");
  }
  std::string take() { return std::move(text_); }

 private:
  std::string name_, text_;
};

void write_outcomes(Writer& w, const char* name, const char* help, const int64_t (&counts)[kTierOutcomes]) {
  w.family(name, "counter", help);
  for (int i = 0; i < kTierOutcomes; ++i)
    w.sample(double(counts[i]), {{"outcome", tier_outcome_name(TierOutcome(i))}});
}

void write_tier(Writer& w, const engine::TierFigures& f) {
  w.one("tier_open", "gauge", "1 once the model is known by its content: blocks are stored and read from then on.",
        int64_t{f.open});
  w.one("tier_down", "gauge", "1 while the folder does not work and is left alone.", int64_t{f.tier.down});
  w.one("tier_bytes", "gauge", "Bytes that the folder takes.", f.tier.bytes);
  w.one("tier_budget_bytes", "gauge", "Bytes that it may take.", f.tier.budget);
  w.one("tier_blocks", "gauge", "Blocks in it.", f.tier.blocks);
  w.one("tier_waiting_blocks", "gauge", "Blocks that wait to be written.", f.waiting_blocks);
  write_outcomes(w, "tier_gets_total", "Blocks asked for, by outcome; done: read and verified.", f.tier.gets);
  write_outcomes(w, "tier_puts_total", "Blocks to be stored, by outcome.", f.tier.puts);
  w.family("tier_skipped_total", "counter", "Blocks that were not handed to the tier, by reason.");
  w.sample(double(f.skipped_closed), {{"reason", "closed"}});
  w.sample(double(f.skipped_queue), {{"reason", "queue"}});
  w.sample(double(f.skipped_gave_way), {{"reason", "gave_way"}});
  w.one("tier_restores_total", "counter", "Prompts whose beginning was read back.", f.restores);
  w.family("tier_not_restored_total", "counter", "Prompts that were computed all the same, by reason.");
  w.sample(double(f.not_short), {{"reason", "short"}});
  w.sample(double(f.not_faster), {{"reason", "faster"}});
  w.sample(double(f.not_room), {{"reason", "room"}});
  w.sample(double(f.not_late), {{"reason", "late"}});
  w.one("tier_restored_tokens_total", "counter", "Tokens that came back.", f.restored_tokens);
  w.one("tier_read_bytes_total", "counter", "Bytes read from the folder.", f.tier.bytes_read);
  w.one("tier_written_bytes_total", "counter", "Bytes written to it.", f.tier.bytes_written);
  w.one("tier_restore_seconds_total", "counter", "Time that restores took.", f.restore_seconds);
}

void write_figures(Writer& w, const MetricsInput& in) {
  const engine::SchedulerStats& s = in.scheduler;
  const Stats& cache = s.cache;
  w.family("prompt_tokens_total", "counter", "Prompt tokens by where their K and V came from.");
  w.sample(double(s.prompt_tokens_computed), {{"source", "computed"}});
  w.sample(double(s.prompt_tokens_cached), {{"source", "cached"}});
  int64_t queried = 0;
  for (const auto& [reason, tokens] : cache.hits_by_reason) queried += tokens;
  w.one("prefix_queries_tokens_total", "counter", "Prompt tokens that were looked up in the cache.", queried);
  w.one("prefix_hits_tokens_total", "counter", "Of them found.", cache.hit_tokens);
  w.family("prefix_tokens_total", "counter", "Tokens looked up, by result: hit, or why not reused.");
  for (const auto& [reason, tokens] : cache.hits_by_reason) w.sample(double(tokens), {{"reason", reason}});
  w.one("generated_tokens_total", "counter", "Tokens of answers.", s.generated_tokens);

  w.family("blocks", "gauge", "Blocks of the pool by state; the sum is all that have memory.");
  w.sample(double(cache.blocks_free), {{"state", "free"}});
  w.sample(double(cache.blocks_open), {{"state", "open"}});
  w.sample(double(cache.blocks_full), {{"state", "full"}});
  w.sample(double(cache.blocks_shared), {{"state", "shared"}});
  w.sample(double(cache.blocks_cached), {{"state", "cached"}});
  w.one("block_utilization", "gauge", "Share of the blocks that sequences hold, 0 to 1.", cache.block_utilization);
  w.family("cache_bytes", "gauge", "Memory of K and V: address space, writable, in RAM, held by sequences.");
  w.sample(double(cache.bytes_reserved), {{"kind", "reserved"}});
  w.sample(double(cache.bytes_committed), {{"kind", "committed"}});
  w.sample(double(cache.bytes_resident), {{"kind", "resident"}});
  w.sample(double(cache.bytes_in_use), {{"kind", "in_use"}});
  w.one("evictions_total", "counter", "Cached blocks that made room for others.", cache.evictions);
  w.one("block_copies_total", "counter", "Blocks copied before a write (copy on write, partial hits).",
        cache.copies);
  w.one("growth_events_total", "counter", "Times the pool grew.", cache.growth_events);
  w.one("dense_materializations_total", "counter", "Dense forms of K and V that were built; attention builds none.",
        cache.dense_materializations);

  if (s.tier) write_tier(w, *s.tier);
  w.one("sequences_running", "gauge", "Sequences in the current step.", s.running);
  w.one("sequences_waiting", "gauge", "Sequences that wait for room or for a turn.", s.waiting);
  w.one("preemptions_total", "counter", "Sequences that gave their blocks back and were computed again.",
        s.preemptions);
  w.one("requests_total", "counter", "Requests accepted.", s.requests);
  w.one("requests_refused_total", "counter", "Requests refused because the queue was full.", s.refused);
  w.family("requests_finished_total", "counter", "Requests that ended, and how.");
  w.sample(double(s.finished_stop), {{"reason", "stop"}});
  w.sample(double(s.finished_length), {{"reason", "length"}});
  w.sample(double(s.cancelled), {{"reason", "cancelled"}});
  w.sample(double(s.failed), {{"reason", "failed"}});
  w.one("steps_total", "counter", "Steps of the model.", s.steps);
  w.one("busy_seconds_total", "counter", "Time of the engine's loop while there was work.", s.busy_seconds);
  w.one("model_seconds_total", "counter", "Of it inside the model.", s.model_seconds);
  w.one("step_age_seconds", "gauge", "Age of the step that runs now; 0 while none does.", s.seconds_in_step);
  w.histogram("time_to_first_token_seconds", "From arrival to the first token.", s.first_token_seconds);
  w.histogram("time_between_tokens_seconds", "Between two tokens of one answer.", s.between_tokens_seconds);
  w.histogram("request_seconds", "From arrival to the end of a request.", s.request_seconds);

  w.one("http_connections", "gauge", "Open connections.", in.http.connections);
  w.one("http_connections_accepted_total", "counter", "Connections since the start.", in.http.accepted);
  w.one("http_connections_refused_total", "counter", "Connections past the limit.", in.http.refused_connections);
  w.one("http_bad_requests_total", "counter", "Requests that were not HTTP, or past a limit of size or time.",
        in.http.bad_requests);
  w.one("http_clients_gone_total", "counter", "Clients that left before their answer was complete.", in.http.gone);
  w.one("http_slow_readers_total", "counter", "Clients cut off because they did not read.", in.http.slow_readers);
}

}  // namespace

std::string metrics_text(const MetricsInput& in) {
  Writer w;
  w.family("build_info", "gauge", "Always 1; what runs is in the labels.");
  w.sample(1, {{"version", in.version}, {"model", in.model}, {"isa", in.isa}, {"kv_quant", in.kv_quant}});
  w.one("ready", "gauge", "1 while requests are served, 0 while the model loads or the server stops.",
        int64_t{in.ready});

  if (in.loaded) write_figures(w, in);
  w.one("log_lines_lost_total", "counter", "Lines of the log that stderr did not take.", in.lost_log_lines);
  if (!in.replies.empty()) w.family("http_replies_total", "counter", "Replies by path and status.");
  for (const auto& [key, count] : in.replies)
    w.sample(double(count), {{"path", key.first}, {"code", std::to_string(key.second)}});
  return w.take();
}

}  // namespace pagedkv::server
