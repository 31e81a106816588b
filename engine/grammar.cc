#include "engine/grammar.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "engine/text.h"

namespace pagedkv::engine {
namespace {

constexpr uint32_t kMaxCharacter = 0x10ffff;
constexpr uint32_t kStart = 0xffffffffu;  // the left-hand side whose end is the answer's end
constexpr size_t kFewItems = 24;          // up to here a look at each is quicker than a hash

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

}  // namespace

// --- reading GBNF ------------------------------------------------------------------------------------------------
class GrammarParser {
 public:
  explicit GrammarParser(std::string_view text) : text_(text), out_(new Grammar) {}

  Result<std::shared_ptr<const Grammar>> parse() {
    skip_space(true);
    while (!at_end() && status_.ok()) rule();
    if (status_.ok()) check_names();
    if (status_.ok()) status_ = out_->finish();
    if (!status_.ok()) return status_;
    return std::shared_ptr<const Grammar>(std::move(out_));
  }

 private:
  using Element = Grammar::Element;
  using Kind = Grammar::Kind;
  using Sequence = std::vector<Element>;

  // --- characters ---
  bool at_end() const { return at_ >= text_.size(); }
  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  bool fail(const std::string& what) {
    if (status_.ok()) {
      const auto line =
          1 +
          std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(std::min(at_, text_.size())), '\n');
      status_ = invalid_argument("[grammar] line " + std::to_string(line) + ": " + what);
    }
    return false;
  }
  std::string found() const {
    if (at_end()) return "the end";
    const auto end = std::min(text_.find_first_of(" \t\r\n", at_ + 1), text_.size());
    return "\"" + std::string(text_.substr(at_, std::min<size_t>(end - at_, 20))) + "\"";
  }
  void skip_space(bool newlines) {
    for (; !at_end(); ++at_) {
      const char c = peek();
      if (c == '#') at_ = std::min(text_.find_first_of("\r\n", at_), text_.size());
      if (at_end() || !(peek() == ' ' || peek() == '\t' || (newlines && (peek() == '\r' || peek() == '\n'))))
        return;
    }
  }
  std::string_view word() {
    const size_t begin = at_;
    while (is_word(peek())) ++at_;
    return text_.substr(begin, at_ - begin);
  }
  std::optional<int64_t> number() {
    int64_t value = 0;
    const size_t begin = at_;
    for (; peek() >= '0' && peek() <= '9'; ++at_) value = std::min<int64_t>(value * 10 + (peek() - '0'), INT32_MAX);
    if (at_ == begin) return std::nullopt;
    return value;
  }
  // One character of a literal or a class, escapes resolved. The text is valid UTF-8.
  bool character(uint32_t& out) {
    const auto byte = static_cast<unsigned char>(peek());
    if (byte != '\\') {
      const int size = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
      out = size == 1 ? byte : byte & (0x3f >> (size - 1));
      for (int i = 1; i < size; ++i)
        out = out << 6 | (static_cast<unsigned char>(peek(static_cast<size_t>(i))) & 0x3f);
      at_ += static_cast<size_t>(size);
      return true;
    }
    const char kind = peek(1);
    const size_t digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
    if (digits == 0) {
      static constexpr std::string_view kNames = "trn\\\"[]-", kMeanings = "\t\r\n\\\"[]-";
      const size_t which = kNames.find(kind);
      if (which == std::string_view::npos || at_ + 1 >= text_.size()) return fail("unknown escape " + found());
      out = static_cast<unsigned char>(kMeanings[which]);
      at_ += 2;
      return true;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < digits; ++i) {
      const char c = peek(2 + i);
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return fail(std::to_string(digits) + " hexadecimal digits are expected in " + found());
      value = value * 16 + static_cast<uint64_t>(digit);
    }
    if (value > kMaxCharacter) return fail(found() + " is no character: the last one is U+10FFFF");
    out = static_cast<uint32_t>(value);
    at_ += 2 + digits;
    return true;
  }

  // --- rules ---
  uint32_t new_rule() {
    out_->rules_.emplace_back();
    return static_cast<uint32_t>(out_->rules_.size() - 1);
  }
  uint32_t rule_named(std::string_view name) {
    const auto [at, added] = names_.try_emplace(std::string(name), 0);
    if (added) at->second = new_rule();
    return at->second;
  }
  bool add_alternative(uint32_t rule, const Sequence& elements) {
    auto& all = out_->elements_;
    if (elements.size() + 1 > Grammar::kMaxElements - std::min(all.size(), Grammar::kMaxElements))
      return fail("the grammar has more than " + std::to_string(Grammar::kMaxElements) +
                  " elements, repetitions written out");
    out_->rules_[rule].alternatives.push_back(static_cast<uint32_t>(all.size()));
    all.insert(all.end(), elements.begin(), elements.end());
    all.push_back({Kind::kEnd, 0});
    return true;
  }

  bool rule() {
    const std::string_view name = word();
    if (name.empty()) return fail("a rule's name is expected, found " + found());
    skip_space(false);
    if (text_.substr(at_, 3) != "::=")
      return fail("::= is expected after \"" + std::string(name) + "\", found " + found());
    at_ += 3;
    skip_space(true);
    const uint32_t id = rule_named(name);
    // Defined twice: the last definition holds, as in llama.cpp.
    out_->rules_[id].alternatives.clear();
    if (!alternatives(id, 0)) return false;
    if (!at_end() && peek() != '\r' && peek() != '\n')
      return fail("the end of the rule is expected, found " + found());
    skip_space(true);
    return true;
  }

  bool alternatives(uint32_t rule, int depth) {
    while (true) {
      Sequence elements;
      if (!sequence(elements, depth) || !add_alternative(rule, elements)) return false;
      if (peek() != '|') return true;
      ++at_;
      skip_space(true);
    }
  }

  bool sequence(Sequence& out, int depth) {
    size_t last = out.size();  // where the item begins that a repetition would repeat
    bool item = false;
    while (!at_end() && status_.ok()) {
      const char c = peek();
      const bool repeats = c == '*' || c == '+' || c == '?' || c == '{';
      if (repeats) {
        if (!item) return fail("nothing stands before " + found() + " to be repeated");
        if (!repetition(out, last)) return false;
        skip_space(depth > 0);
        continue;
      }
      last = out.size();
      item = true;
      if (c == '"') {
        if (!literal(out)) return false;
      } else if (c == '[') {
        if (!char_class(out)) return false;
      } else if (c == '.') {
        ++at_;
        add_class(out, true, {});
      } else if (c == '(') {
        if (depth >= Grammar::kMaxDepth)
          return fail("parentheses are nested more than " + std::to_string(Grammar::kMaxDepth) + " deep");
        ++at_;
        skip_space(true);
        const uint32_t group = new_rule();
        if (!alternatives(group, depth + 1)) return false;
        if (peek() != ')') return fail(") is expected, found " + found());
        ++at_;
        out.push_back({Kind::kRule, group});
      } else if (is_word(c)) {
        out.push_back({Kind::kRule, rule_named(word())});
      } else if (c == '<' || c == '!') {
        return fail("tokens in grammars (" + found() + ") are not supported, only text");
      } else {
        return true;
      }
      skip_space(depth > 0);
    }
    return status_.ok();
  }

  bool literal(Sequence& out) {
    for (++at_; peek() != '"';) {
      uint32_t c = 0;
      if (at_end()) return fail("a literal is not closed");
      if (!character(c)) return false;
      out.push_back({Kind::kChar, c});
    }
    ++at_;
    return true;
  }

  bool char_class(Sequence& out) {
    ++at_;
    const bool negated = peek() == '^';
    if (negated) ++at_;
    std::vector<Grammar::Range> ranges;
    while (peek() != ']') {
      uint32_t low = 0;
      if (at_end()) return fail("a character class is not closed");
      if (!character(low)) return false;
      uint32_t high = low;
      if (peek() == '-' && peek(1) != ']') {
        ++at_;
        if (at_end()) return fail("a character class is not closed");
        if (!character(high)) return false;
        if (high < low) return fail("a range of characters ends before it begins");
      }
      ranges.push_back({low, high});
    }
    ++at_;
    if (ranges.empty() && !negated) return fail("a character class is empty");
    add_class(out, negated, ranges);
    return true;
  }
  void add_class(Sequence& out, bool negated, const std::vector<Grammar::Range>& ranges) {
    Grammar::Class made{.negated = negated, .begin = static_cast<uint32_t>(out_->ranges_.size())};
    out_->ranges_.insert(out_->ranges_.end(), ranges.begin(), ranges.end());
    made.end = static_cast<uint32_t>(out_->ranges_.size());
    out.push_back({Kind::kClass, static_cast<uint32_t>(out_->classes_.size())});
    out_->classes_.push_back(made);
  }

  // The last item of `out`, which begins at `last`, becomes X X ... X and then what may follow.
  bool repetition(Sequence& out, size_t last) {
    int64_t least = 0, most = -1;  // -1: no end
    const char c = peek();
    ++at_;
    if (c == '+') least = 1;
    if (c == '?') most = 1;
    if (c == '{') {
      skip_space(true);
      const auto first = number();
      if (!first) return fail("a number is expected after {, found " + found());
      least = most = *first;
      skip_space(true);
      if (peek() == ',') {
        ++at_;
        skip_space(true);
        const auto second = number();
        most = second ? *second : -1;
        skip_space(true);
      }
      if (peek() != '}') return fail("} is expected, found " + found());
      ++at_;
      if (std::max(least, most) > Grammar::kMaxRepetitions)
        return fail(std::to_string(std::max(least, most)) + " repetitions are asked, the limit is " +
                    std::to_string(Grammar::kMaxRepetitions));
      if (most >= 0 && most < least) return fail("{m,n} needs m <= n");
    }
    Sequence item(out.begin() + static_cast<std::ptrdiff_t>(last), out.end());
    out.resize(last);
    if (item.size() > 1) {  // a literal, or what an earlier repetition wrote out
      const uint32_t rule = new_rule();
      if (!add_alternative(rule, item)) return false;
      item = {{Kind::kRule, rule}};
    }
    for (int64_t i = 0; i < least; ++i) out.insert(out.end(), item.begin(), item.end());
    if (most < 0) {  // R ::= X R | (nothing)
      const uint32_t rule = new_rule();
      Sequence again = item;
      again.push_back({Kind::kRule, rule});
      if (!item.empty() && !add_alternative(rule, again)) return false;
      if (!add_alternative(rule, {})) return false;
      out.push_back({Kind::kRule, rule});
    } else if (most > least) {  // R1 ::= X R2 | (nothing), R2 ::= X R3 | (nothing), ...
      uint32_t next = new_rule();
      out.push_back({Kind::kRule, next});
      for (int64_t i = least; i < most; ++i) {
        const uint32_t rule = next;
        Sequence once = item;
        if (i + 1 < most) once.push_back({Kind::kRule, next = new_rule()});
        if (!add_alternative(rule, once) || !add_alternative(rule, {})) return false;
      }
    }
    return true;
  }

  bool check_names() {
    for (const auto& [name, id] : names_)
      if (out_->rules_[id].alternatives.empty()) return fail("the rule \"" + name + "\" is named, and not defined");
    const auto root = names_.find("root");
    if (root == names_.end()) return fail("there is no rule \"root\"");
    out_->root_ = root->second;
    return true;
  }

  const std::string_view text_;
  size_t at_ = 0;
  Status status_;
  std::unique_ptr<Grammar> out_;
  std::unordered_map<std::string, uint32_t> names_;
};

Result<std::shared_ptr<const Grammar>> Grammar::parse(std::string_view gbnf) {
  if (gbnf.size() > kMaxBytes)
    return invalid_argument("[grammar] it has " + std::to_string(gbnf.size()) + " bytes, the limit is " +
                            std::to_string(kMaxBytes));
  if (const int64_t at = find_invalid_utf8(gbnf); at >= 0)
    return invalid_argument("[grammar] it is not valid UTF-8 at byte " + std::to_string(at));
  return GrammarParser(gbnf).parse();
}

// The rules with an alternative of which every element has a property: rules by themselves, characters by
// `characters`. The least such set, in time linear in the grammar.
std::vector<bool> Grammar::least_fixed_point(bool characters) const {
  struct Alternative {
    uint32_t rule;
    int64_t missing;  // rules of it that are not known to have the property
  };
  std::vector<Alternative> alternatives;
  std::vector<std::vector<uint32_t>> users(
      rules_.size());  // by rule: the alternatives that name it, once each time
  std::vector<bool> have(rules_.size());
  std::vector<uint32_t> found;
  const auto take = [&](uint32_t rule) {
    if (have[rule]) return;
    have[rule] = true;
    found.push_back(rule);
  };
  for (uint32_t rule = 0; rule < rules_.size(); ++rule) {
    for (uint32_t at : rules_[rule].alternatives) {
      bool possible = true;
      Alternative made{rule, 0};
      const auto index = static_cast<uint32_t>(alternatives.size());
      for (uint32_t i = at; elements_[i].kind != Kind::kEnd; ++i)
        possible &= characters || elements_[i].kind == Kind::kRule;
      if (!possible) continue;
      for (; elements_[at].kind != Kind::kEnd; ++at) {
        if (elements_[at].kind != Kind::kRule) continue;
        users[elements_[at].value].push_back(index);
        ++made.missing;
      }
      if (made.missing == 0) take(rule);
      alternatives.push_back(made);
    }
  }
  while (!found.empty()) {
    const uint32_t rule = found.back();
    found.pop_back();
    for (const uint32_t user : users[rule])
      if (--alternatives[user].missing == 0) take(alternatives[user].rule);
  }
  return have;
}

Status Grammar::finish() {
  const std::vector<bool> nullable = least_fixed_point(false);
  for (size_t r = 0; r < rules_.size(); ++r) rules_[r].nullable = nullable[r];
  if (!least_fixed_point(true)[root_])
    return invalid_argument("[grammar] \"root\" derives no text: its rules never end");
  return Status();
}

bool Grammar::fits(Element element, uint32_t low, uint32_t high) const {
  if (element.kind == Kind::kChar) return low <= element.value && element.value <= high;
  const Class& chars = classes_[element.value];
  const std::span<const Range> ranges(ranges_.data() + chars.begin, chars.end - chars.begin);
  if (!chars.negated)
    return std::any_of(ranges.begin(), ranges.end(), [&](Range r) { return r.low <= high && low <= r.high; });
  // A character outside: for one it is exact; of several, only a single range that holds them all leaves none.
  return std::none_of(ranges.begin(), ranges.end(), [&](Range r) { return r.low <= low && high <= r.high; });
}

// --- the vocabulary ----------------------------------------------------------------------------------------------
SortedPieces::SortedPieces(const std::vector<std::string>& pieces) {
  std::vector<int32_t> order;
  size_t bytes = 0;
  for (size_t token = 0; token < pieces.size(); ++token) {
    if (pieces[token].empty()) continue;
    order.push_back(static_cast<int32_t>(token));
    bytes += pieces[token].size();
  }
  const auto piece = [&](int32_t token) -> const std::string& { return pieces[static_cast<size_t>(token)]; };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::pair(std::string_view(piece(a)), a) < std::pair(std::string_view(piece(b)), b);
  });
  bytes_.reserve(bytes);
  std::string_view before;
  for (const int32_t token : order) {
    const std::string& text = piece(token);
    const auto common = std::mismatch(text.begin(), text.end(), before.begin(), before.end()).first - text.begin();
    entries_.push_back({token, static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(text.size()),
                        static_cast<uint32_t>(common)});
    bytes_ += text;
    before = text;
  }
}

// --- recognizing -------------------------------------------------------------------------------------------------
GrammarState::GrammarState(std::shared_ptr<const Grammar> grammar)
    : grammar_(std::move(grammar)), predicted_(grammar_->rules_.size()) {
  sets_.emplace_back();
  ++closing_;
  items_.clear();
  for (const uint32_t at : grammar_->rules_[grammar_->root_].alternatives) add({at, kStart, 0});
  if (grammar_->rules_[grammar_->root_].nullable) sets_.back().complete = true;
  close();
}

// Adds an item to the set that is being made, once.
void GrammarState::add(Item item) {
  const auto hash = [](const Item& i) {
    return (uint64_t{i.dot} * 0x9e3779b97f4a7c15u) ^ (uint64_t{i.lhs} * 0xc2b2ae3d27d4eb4fu) ^
           (uint64_t{i.origin} * 0x165667b19e3779f9u);
  };
  if (items_.size() < kFewItems) {
    if (std::find(items_.begin(), items_.end(), item) == items_.end()) items_.push_back(item);
    return;
  }
  const auto place = [&](const Item& i) {
    size_t slot = (hash(i) >> 20) & (slots_.size() - 1);
    while (slots_[slot] != 0 && items_[slots_[slot] - 1] != i) slot = (slot + 1) & (slots_.size() - 1);
    return slot;
  };
  if (items_.size() == kFewItems || items_.size() * 2 > slots_.size()) {
    slots_.assign(std::max<size_t>(4 * kFewItems * 2, 4 * items_.size()), 0);
    size_t size = 1;
    while (size < slots_.size()) size *= 2;
    slots_.assign(size, 0);
    for (size_t i = 0; i < items_.size(); ++i) slots_[place(items_[i])] = static_cast<uint32_t>(i + 1);
  }
  const size_t slot = place(item);
  if (slots_[slot] != 0) return;
  items_.push_back(item);
  slots_[slot] = static_cast<uint32_t>(items_.size());
}

// Follows each item of the new set to what it needs or completes. False: too much of it.
bool GrammarState::close() {
  const uint32_t here = static_cast<uint32_t>(sets_.size() - 1);
  const size_t begin = sets_.back().waiting_begin;
  for (size_t done = 0; done < items_.size();) {  // they grow meanwhile
    if (items_.size() + waiting_.size() > kMaxItems) {
      exhausted_ = true;
      return false;
    }
    const Item item = items_[done++];
    const Grammar::Element next = grammar_->elements_[item.dot];
    if (next.kind == Grammar::Kind::kEnd) {
      if (item.lhs == kStart) sets_.back().complete = true;
      if (item.lhs == kStart || item.origin == here) continue;  // what derives nothing was passed when predicted
      const size_t first = sets_[item.origin].waiting_begin, last = sets_[item.origin + 1].waiting_begin;
      const auto from = std::lower_bound(waiting_.begin() + static_cast<std::ptrdiff_t>(first),
                                         waiting_.begin() + static_cast<std::ptrdiff_t>(last), item.lhs,
                                         [](const Waiting& w, uint32_t lhs) { return w.awaited < lhs; });
      for (size_t w = static_cast<size_t>(from - waiting_.begin()); w < last && waiting_[w].awaited == item.lhs;
           ++w)
        add(waiting_[w].item);
    } else if (next.kind == Grammar::Kind::kRule) {
      const Grammar::Rule& rule = grammar_->rules_[next.value];
      if (grammar_->elements_[item.dot + 1].kind == Grammar::Kind::kEnd) {
        // The last element: where it ends, the item ends, so its alternatives stand for the item's own. This keeps
        // right recursion flat.
        for (const uint32_t at : rule.alternatives) add({at, item.lhs, item.origin});
        continue;
      }
      waiting_.push_back({next.value, {item.dot + 1, item.lhs, item.origin}});
      if (rule.nullable) add({item.dot + 1, item.lhs, item.origin});
      if (std::exchange(predicted_[next.value], closing_) == closing_) continue;
      for (const uint32_t at : rule.alternatives) add({at, next.value, here});
    } else {
      terminals_.push_back(item);
    }
  }
  std::sort(waiting_.begin() + static_cast<std::ptrdiff_t>(begin), waiting_.end(),
            [](const Waiting& a, const Waiting& b) { return a.awaited < b.awaited; });
  return true;
}

bool GrammarState::step(uint32_t character) {
  if (exhausted_) return false;
  const size_t from = sets_.back().terminals_begin, to = terminals_.size();
  ++closing_;
  items_.clear();
  for (size_t i = from; i < to; ++i) {
    const Item item = terminals_[i];
    if (grammar_->fits(grammar_->elements_[item.dot], character, character))
      add({item.dot + 1, item.lhs, item.origin});
  }
  if (items_.empty()) return false;
  sets_.push_back({.waiting_begin = waiting_.size(), .terminals_begin = terminals_.size()});
  return close();
}

bool GrammarState::feed(char c) {
  const auto byte = static_cast<unsigned char>(c);
  if (utf8_.missing == 0) {
    if (byte < 0x80) return step(byte);
    // Neither overlong forms nor surrogates nor what lies past U+10FFFF.
    if (byte >= 0xc2 && byte <= 0xdf) {
      utf8_ = {byte & 0x1fu, 1};
    } else if (byte >= 0xe0 && byte <= 0xef) {
      utf8_ = {byte & 0x0fu, 2, static_cast<uint8_t>(byte == 0xe0 ? 0xa0 : 0x80),
               static_cast<uint8_t>(byte == 0xed ? 0x9f : 0xbf)};
    } else if (byte >= 0xf0 && byte <= 0xf4) {
      utf8_ = {byte & 0x07u, 3, static_cast<uint8_t>(byte == 0xf0 ? 0x90 : 0x80),
               static_cast<uint8_t>(byte == 0xf4 ? 0x8f : 0xbf)};
    } else {
      return false;
    }
    return can_become_a_character();
  }
  if (byte < utf8_.least || byte > utf8_.most) return false;
  const uint32_t bits = utf8_.bits << 6 | (byte & 0x3fu);
  const auto missing = static_cast<uint8_t>(utf8_.missing - 1);
  utf8_ = {.bits = bits, .missing = missing};
  return missing == 0 ? step(bits) : can_become_a_character();
}

// Is there a character that begins with these bytes and fits?
bool GrammarState::can_become_a_character() const {
  if (exhausted_) return false;
  const int later = 6 * (utf8_.missing - 1);
  const uint32_t low = (utf8_.bits << 6 | (utf8_.least & 0x3fu)) << later;
  const uint32_t high = (utf8_.bits << 6 | (utf8_.most & 0x3fu)) << later | ((1u << later) - 1);
  for (size_t i = sets_.back().terminals_begin; i < terminals_.size(); ++i)
    if (grammar_->fits(grammar_->elements_[terminals_[i].dot], low, high)) return true;
  return false;
}

void GrammarState::back_to(const Mark& mark) {
  if (sets_.size() > mark.sets) {
    waiting_.resize(sets_[mark.sets].waiting_begin);
    terminals_.resize(sets_[mark.sets].terminals_begin);
    sets_.resize(mark.sets);
  }
  utf8_ = mark.utf8;
}

// Only the last set's are looked at again.
void GrammarState::forget_terminals() {
  terminals_.erase(terminals_.begin(),
                   terminals_.begin() + static_cast<std::ptrdiff_t>(sets_.back().terminals_begin));
  sets_.back().terminals_begin = 0;
}

bool GrammarState::fits(std::string_view piece) {
  const Mark before = mark();
  const bool all = std::all_of(piece.begin(), piece.end(), [this](char c) { return feed(c); });
  back_to(before);
  return all && !piece.empty();
}

bool GrammarState::advance(std::string_view piece) {
  const Mark before = mark();
  if (piece.empty() || !std::all_of(piece.begin(), piece.end(), [this](char c) { return feed(c); })) {
    back_to(before);
    return false;
  }
  forget_terminals();
  return true;
}

std::vector<int32_t> GrammarState::fitting(const SortedPieces& pieces) {
  std::vector<int32_t> tokens;
  std::vector<Mark> marks{mark()};  // [i]: after i bytes of the current piece
  bool stuck = false;               // the byte after marks.size() - 1 did not fit
  for (const SortedPieces::Entry& entry : pieces.entries_) {
    const size_t reached = marks.size() - 1;
    if (stuck && entry.common > reached) continue;  // begins with the byte that did not fit
    stuck = false;
    marks.resize(std::min<size_t>(entry.common, reached) + 1);
    back_to(marks.back());
    while (marks.size() <= entry.size) {
      if (!feed(pieces.bytes_[entry.begin + marks.size() - 1])) {
        back_to(marks.back());
        stuck = true;
        break;
      }
      marks.push_back(mark());
    }
    if (!stuck) tokens.push_back(entry.token);
  }
  back_to(marks.front());
  return tokens;
}

}  // namespace pagedkv::engine
