// From GBNF to rules. Repetitions and groups become rules of their own.
#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "engine/grammar.h"
#include "engine/text.h"

namespace pagedkv::engine {
namespace {

constexpr uint32_t kMaxCharacter = 0x10ffff;

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

}  // namespace

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
          1 + std::count(text_.begin(), text_.begin() + std::ptrdiff_t(std::min(at_, text_.size())), '\n');
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
      for (int i = 1; i < size; ++i) out = out << 6 | (static_cast<unsigned char>(peek(size_t(i))) & 0x3f);
      at_ += size_t(size);
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
      value = value * 16 + uint64_t(digit);
    }
    if (value > kMaxCharacter) return fail(found() + " is no character: the last one is U+10FFFF");
    out = uint32_t(value);
    at_ += 2 + digits;
    return true;
  }

  // --- rules ---
  uint32_t new_rule() {
    out_->rules_.emplace_back();
    return uint32_t(out_->rules_.size() - 1);
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
    out_->rules_[rule].alternatives.push_back(uint32_t(all.size()));
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
    Grammar::Class made{.negated = negated, .begin = uint32_t(out_->ranges_.size())};
    out_->ranges_.insert(out_->ranges_.end(), ranges.begin(), ranges.end());
    made.end = uint32_t(out_->ranges_.size());
    out.push_back({Kind::kClass, uint32_t(out_->classes_.size())});
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
    Sequence item(out.begin() + std::ptrdiff_t(last), out.end());
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

}  // namespace pagedkv::engine
