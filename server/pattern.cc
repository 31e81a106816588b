#include "server/pattern.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace pagedkv::server {
namespace {

constexpr int kMaxGroups = 100;  // in each other
constexpr int64_t kMaxTimes = 1000;
constexpr size_t kMaxNodes = 8000;       // of the nondeterministic automaton
constexpr size_t kMaxWork = 10'000'000;  // steps of making it deterministic

// ^ and $ are characters before and behind each text.
constexpr uint32_t kBegin = kMaxCharacter + 1, kEnd = kMaxCharacter + 2;

struct Range {
  uint32_t low, high;
};
using Set = std::vector<Range>;

const Set kDigits = {{'0', '9'}};
const Set kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const Set kSpace = {{'\t', '\r'},     {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
                    {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}, {0xfeff, 0xfeff}};
const Set kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

Set opposite(Set set) {
  std::sort(set.begin(), set.end(), [](const Range& a, const Range& b) { return a.low < b.low; });
  Set out;
  uint32_t from = 0;
  for (const Range& range : set) {
    if (from < range.low) out.push_back({from, range.low - 1});
    from = std::max(from, range.high + 1);
  }
  if (from <= kMaxCharacter) out.push_back({from, kMaxCharacter});
  return out;
}

// A nondeterministic automaton, as it grows.
struct Node {
  std::vector<uint32_t> free;  // reached without a character
  std::vector<Automaton::Arc> arcs;
};

// What a piece of a pattern says; the whole is a tree.
struct Term {
  enum class Kind { kSet, kSequence, kChoice, kRepeat } kind = Kind::kSequence;
  Set set;
  std::vector<Term> parts;
  int64_t least = 0, most = -1;  // kRepeat; -1: no end
};

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(characters(text)) {}

  Result<Term> parse() {
    Term term = choice(0);
    if (status_.ok() && at_ < text_.size()) fail("a ) closes nothing");
    if (!status_.ok()) return status_;
    return term;
  }

 private:
  uint32_t peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : 0; }
  bool take(char c) {
    if (at_ >= text_.size() || peek() != uint32_t(c)) return false;
    ++at_;
    return true;
  }
  void fail(const std::string& what) {
    if (status_.ok()) status_ = invalid_argument("[pattern] at character " + std::to_string(at_ + 1) + ": " + what);
    at_ = text_.size();
  }

  Term choice(int depth) {
    Term out{.kind = Term::Kind::kChoice};
    if (depth > kMaxGroups) {
      fail("groups are nested too deeply");
      return out;
    }
    do {
      out.parts.push_back(sequence(depth));
    } while (take('|'));
    return out;
  }

  Term sequence(int depth) {
    Term out;
    while (at_ < text_.size() && peek() != '|' && peek() != ')') {
      const bool anchor = peek() == '^' || peek() == '$';
      out.parts.push_back(atom(depth));
      quantify(out.parts.back(), anchor);
    }
    return out;
  }

  Term atom(int depth) {
    const uint32_t c = text_[at_++];
    switch (c) {
      case '^':
        return {.kind = Term::Kind::kSet, .set = {{kBegin, kBegin}}};
      case '$':
        return {.kind = Term::Kind::kSet, .set = {{kEnd, kEnd}}};
      case '.':
        return {.kind = Term::Kind::kSet, .set = opposite(kLineEnds)};
      case '[':
        return {.kind = Term::Kind::kSet, .set = char_class()};
      case '(':
        return group(depth);
      case '\\':
        return {.kind = Term::Kind::kSet, .set = escape()};
      case '*':
      case '+':
      case '?':
      case '{':
        fail("nothing stands before it to be repeated");
        break;
      default:
        break;
    }
    return {.kind = Term::Kind::kSet, .set = {{c, c}}};
  }

  Term group(int depth) {
    if (take('?')) {
      if (peek() == '<' && peek(1) != '=' && peek(1) != '!') {
        while (at_ < text_.size() && peek() != '>') ++at_;
        take('>');
      } else if (!take(':')) {
        fail("lookaround and flags are not supported");
      }
    }
    Term term = choice(depth + 1);
    if (!take(')')) fail("a group is not closed");
    return term;
  }

  std::optional<int64_t> number() {
    const size_t begin = at_;
    int64_t value = 0;
    for (; peek() >= '0' && peek() <= '9'; ++at_)
      value = std::min(value * 10 + (int64_t(peek()) - '0'), kMaxTimes + 1);
    return at_ > begin ? std::optional(value) : std::nullopt;
  }

  void quantify(Term& term, bool anchor) {
    int64_t least = 0, most = -1;
    if (take('+')) {
      least = 1;
    } else if (take('?')) {
      most = 1;
    } else if (take('{')) {
      const auto first = number();
      least = most = first.value_or(0);
      if (take(',')) most = number().value_or(-1);
      if (!first || !take('}')) return fail("{m}, {m,} or {m,n} is expected");
      if (std::max(least, most) > kMaxTimes) return fail("more than " + std::to_string(kMaxTimes) + " repetitions");
      if (most >= 0 && most < least) return fail("{m,n} needs m <= n");
    } else if (!take('*')) {
      return;
    }
    if (anchor) return fail("an anchor cannot be repeated");
    take('?');  // lazy: the same texts
    Term repeated{.kind = Term::Kind::kRepeat, .least = least, .most = most};
    repeated.parts.push_back(std::move(term));
    term = std::move(repeated);
  }

  // Behind the backslash.
  Set escape() {
    if (at_ >= text_.size()) {
      fail("a \\ ends the pattern");
      return {};
    }
    const uint32_t c = text_[at_++];
    switch (c) {
      case 'd':
        return kDigits;
      case 'D':
        return opposite(kDigits);
      case 'w':
        return kWord;
      case 'W':
        return opposite(kWord);
      case 's':
        return kSpace;
      case 'S':
        return opposite(kSpace);
      case 't':
        return {{'\t', '\t'}};
      case 'n':
        return {{'\n', '\n'}};
      case 'r':
        return {{'\r', '\r'}};
      case 'f':
        return {{'\f', '\f'}};
      case 'v':
        return {{'\v', '\v'}};
      case 'x':
        return hexadecimal(2);
      case 'u':
        return hexadecimal(4);
      default:
        break;
    }
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (letter || (c >= '0' && c <= '9')) fail("this escape is not supported");
    return {{c, c}};
  }

  Set hexadecimal(int digits) {
    uint32_t value = 0;
    for (int i = 0; i < digits; ++i, ++at_) {
      const uint32_t c = peek();
      const bool digit = c >= '0' && c <= '9', lower = c >= 'a' && c <= 'f', upper = c >= 'A' && c <= 'F';
      if (!digit && !lower && !upper) fail("hexadecimal digits are expected");
      value = value * 16 + (digit ? c - '0' : (c | 0x20) - 'a' + 10);
      if (!status_.ok()) return {};
    }
    if (value >= 0xd800 && value <= 0xdfff) fail("half a surrogate pair is no character");
    return {{value, value}};
  }

  Set char_class() {
    Set set;
    const bool negated = take('^');
    while (at_ < text_.size() && peek() != ']') {
      const Set first = class_atom();
      const bool range = peek() == '-' && at_ + 1 < text_.size() && peek(1) != ']';
      if (!range) {
        set.insert(set.end(), first.begin(), first.end());
        continue;
      }
      ++at_;
      const Set last = class_atom();
      if (!status_.ok()) return {};
      const bool ends = first.size() == 1 && first[0].low == first[0].high && last.size() == 1 &&
                        last[0].low == last[0].high && first[0].low <= last[0].low;
      if (!ends) {
        fail("this is no range of characters");
        return {};
      }
      set.push_back({first[0].low, last[0].low});
    }
    if (!take(']')) fail("a class is not closed");
    return negated ? opposite(set) : set;
  }
  Set class_atom() {
    const uint32_t c = text_[at_++];
    return c == '\\' ? escape() : Set{{c, c}};
  }

  const std::vector<uint32_t> text_;
  size_t at_ = 0;
  Status status_;
};

// By Thompson's construction: `from` -> term -> the node returned.
class Builder {
 public:
  uint32_t node() {
    nodes_.emplace_back();
    return uint32_t(nodes_.size() - 1);
  }
  void join(uint32_t from, uint32_t to) { nodes_[from].free.push_back(to); }
  void arc(uint32_t from, Range range, uint32_t to) { nodes_[from].arcs.push_back({range.low, range.high, to}); }
  bool too_large() const { return nodes_.size() > kMaxNodes; }
  const std::vector<Node>& nodes() const { return nodes_; }

  uint32_t build(const Term& term, uint32_t from) {
    if (too_large()) return from;
    uint32_t to = from;
    switch (term.kind) {
      case Term::Kind::kSet:
        to = node();
        for (const Range& range : term.set) arc(from, range, to);
        return to;
      case Term::Kind::kSequence:
        for (const Term& part : term.parts) to = build(part, to);
        return to;
      case Term::Kind::kChoice:
        to = node();
        for (const Term& part : term.parts) join(build(part, from), to);
        return to;
      case Term::Kind::kRepeat:
        break;
    }
    const Term& part = term.parts[0];
    for (int64_t i = 0; i < term.least && !too_large(); ++i) to = build(part, to);
    if (term.most < 0) {
      const uint32_t loop = node();
      join(to, loop);
      join(build(part, loop), loop);
      const uint32_t after = node();  // what joins the loop later may not be repeated with it
      join(loop, after);
      return after;
    }
    const uint32_t after = node();
    for (int64_t i = term.least; i < term.most && !too_large(); ++i) {
      join(to, after);
      to = build(part, to);
    }
    join(to, after);
    return after;
  }

 private:
  std::vector<Node> nodes_;
};

// Subsets of nodes become states.
class Determiner {
 public:
  // all: the node that accepts whatever follows, so nodes beside it add nothing
  Determiner(const std::vector<Node>& nodes, uint32_t all, uint32_t last)
      : nodes_(nodes), all_(all), last_(last), seen_(nodes.size()) {}

  std::optional<Automaton> determine() {
    const uint32_t start = state_of({0});
    for (uint32_t done = 0; done < subsets_.size(); ++done) {
      expand(done);
      if (work_ > kMaxWork || subsets_.size() > Automaton::kMaxStates) return std::nullopt;
    }
    // Behind the character that stands before each text, and before the one behind it.
    Automaton out;
    const auto target = [&](uint32_t state, uint32_t character) -> std::optional<uint32_t> {
      for (const auto& arc : states_[state].arcs)
        if (arc.low <= character && character <= arc.high) return arc.target;
      return std::nullopt;
    };
    const auto first = target(start, kBegin);
    if (!first) return out;
    out.states.push_back({});
    for (uint32_t s = 0; s < states_.size(); ++s) {
      const auto end = target(s, kEnd);
      Automaton::State state{.accepts = end && states_[*end].accepts};
      for (Automaton::Arc arc : states_[s].arcs) {
        if (arc.low > kMaxCharacter) continue;
        arc.target += 1;
        state.arcs.push_back(arc);
      }
      if (s == *first) out.states[0] = state;
      out.states.push_back(std::move(state));
    }
    trim(out);
    return out;
  }

 private:
  uint32_t state_of(std::vector<uint32_t> nodes) {
    ++round_;
    std::erase_if(nodes, [&](uint32_t n) { return std::exchange(seen_[n], round_) == round_; });
    for (size_t i = 0; i < nodes.size(); ++i)  // it grows meanwhile
      for (const uint32_t n : nodes_[nodes[i]].free)
        if (std::exchange(seen_[n], round_) != round_) nodes.push_back(n);
    work_ += nodes.size();
    const bool ends = seen_[last_] == round_;
    if (seen_[all_] == round_) nodes = ends ? std::vector{all_, last_} : std::vector{all_};
    std::sort(nodes.begin(), nodes.end());
    const auto [at, added] = known_.try_emplace(nodes, uint32_t(subsets_.size()));
    if (added) {
      states_.push_back({.accepts = ends});
      subsets_.push_back(std::move(nodes));
    }
    return at->second;
  }

  void expand(uint32_t state) {
    std::vector<Automaton::Arc> arcs;
    for (const uint32_t n : subsets_[state]) arcs.insert(arcs.end(), nodes_[n].arcs.begin(), nodes_[n].arcs.end());
    std::vector<uint32_t> borders;
    for (const auto& arc : arcs) borders.insert(borders.end(), {arc.low, arc.high + 1});
    std::sort(borders.begin(), borders.end());
    borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
    for (size_t i = 0; i + 1 < borders.size() && work_ <= kMaxWork; ++i) {
      std::vector<uint32_t> targets;
      for (const auto& arc : arcs)
        if (arc.low <= borders[i] && borders[i] <= arc.high) targets.push_back(arc.target);
      work_ += arcs.size();
      if (targets.empty()) continue;
      const uint32_t target = state_of(std::move(targets));
      auto& out = states_[state].arcs;
      // ^ and $ keep arcs of their own.
      const bool longer = !out.empty() && out.back().target == target && out.back().high + 1 == borders[i] &&
                          borders[i] <= kMaxCharacter;
      if (longer) {
        out.back().high = borders[i + 1] - 1;
      } else {
        out.push_back({borders[i], borders[i + 1] - 1, target});
      }
    }
  }

  const std::vector<Node>& nodes_;
  const uint32_t all_, last_;
  std::vector<uint64_t> seen_;  // by node: the last round that met it
  uint64_t round_ = 0;
  size_t work_ = 0;
  std::map<std::vector<uint32_t>, uint32_t> known_;
  std::vector<std::vector<uint32_t>> subsets_;
  std::vector<Automaton::State> states_;
};

}  // namespace

Result<Automaton> pattern_automaton(std::string_view pattern) {
  const Result<Term> term = Parser(pattern).parse();
  if (!term.ok()) return term.status();
  Builder builder;
  const uint32_t start = builder.node(), before = builder.node(), begin = builder.node();
  const uint32_t all = builder.node(), last = builder.node();
  builder.join(start, begin);  // the pattern's own ^, or any beginning
  builder.arc(start, {kBegin, kBegin}, before);
  builder.arc(before, {0, kMaxCharacter}, before);
  builder.join(before, begin);
  const uint32_t end = builder.build(*term, begin);
  builder.join(end, last);  // its own $, or any end
  builder.join(end, all);
  builder.arc(all, {0, kMaxCharacter}, all);
  builder.arc(all, {kBegin, kBegin}, all);
  builder.arc(all, {kEnd, kEnd}, last);
  std::optional<Automaton> automaton;
  if (!builder.too_large()) automaton = Determiner(builder.nodes(), all, last).determine();
  if (!automaton) return invalid_argument("[pattern] it needs too many states");
  return *std::move(automaton);
}

std::optional<std::string> format_pattern(std::string_view format) {
  // Year 0000 is in no calendar that clients have; 29 February only in leap years.
  const std::string year = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)";
  const std::string leap_year = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)";
  const std::string short_month = "(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])";
  const std::string long_months = "(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31";
  const std::string date = "(" + year + "-(" + short_month + "|" + long_months + ")|" + leap_year + "-02-29)";
  const std::string hour = "([01][0-9]|2[0-3])", minute = ":[0-5][0-9]";
  const std::string time = hour + minute + minute + "(\\.[0-9]{1,6})?(Z|[+-]" + hour + minute + ")";
  if (format == "date") return "^" + date + "$";
  if (format == "time") return "^" + time + "$";
  if (format == "date-time") return "^" + date + "T" + time + "$";
  if (format == "uuid") return "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$";
  return std::nullopt;
}

}  // namespace pagedkv::server
