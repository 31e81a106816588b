#include "server/json_grammar.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "server/grammar_rules.h"
#include "server/json_schema.h"

namespace pagedkv::server {
namespace {

constexpr size_t kMaxRules = 2000;        // of values
constexpr int64_t kMaxRepeats = 100'000;  // of characters and items, written out by the grammar's reader
constexpr int64_t kNoEnd = INT64_MAX;

// The grammar of a schema: a rule for each conjunction of its parts that stands somewhere, made one after the
// other, so that schemas may refer to themselves.
class JsonGrammar {
 public:
  JsonGrammar(const OrderedJson& root, const std::string& param) : schema_(root, param), param_(param) {}

  ApiResult<std::string> build() {
    const std::string root = value(schema_.whole());
    for (size_t i = 0; i < made_.size() && !schema_.error(); ++i) {  // it grows meanwhile
      const Conjunction all = made_[i].all;
      write(i, all);
    }
    if (!schema_.error()) check_ends();
    if (schema_.error()) return *schema_.error();
    rules_.add("root", root + " " + rules_.use("ws"));
    return rules_.text();
  }

 private:
  // A rule of a value. It ends when for one of `ways` all the rules do that it cannot go without.
  struct Made {
    Conjunction all;
    std::vector<std::vector<size_t>> ways;
    bool ends = false;
  };

  void refuse(const std::string& path, const std::string& what) { schema_.refuse(path, what); }
  const std::string& path_of(const Conjunction& all) const { return all.empty() ? param_ : all[0].path; }
  std::string add(const std::string& rule) {
    std::string name = "p" + std::to_string(++n_pieces_);
    rules_.add(name, rule);
    if (rules_.too_large()) refuse(param_, "the schema's grammar is too large");
    return name;
  }
  bool possible(const Conjunction& all) {
    return all.empty() || !schema_.forms(all, Schema::Reading::kWritten).empty();
  }

  // The name of the rule of a value that obeys `all`. One that is needed ends only when that rule does.
  std::string value(const Conjunction& all, std::vector<size_t>* needed = nullptr) {
    std::vector<const OrderedJson*> key;
    for (const Place& place : all)
      if (*place.schema != true) key.push_back(place.schema);
    if (key.empty()) return rules_.use("value");
    std::sort(key.begin(), key.end());
    key.erase(std::unique(key.begin(), key.end()), key.end());
    const auto [known, added] = known_.try_emplace(std::move(key), made_.size());
    if (added) {
      made_.push_back({.all = all});
      if (made_.size() > kMaxRules)
        refuse(path_of(all), "the schema needs more than " + std::to_string(kMaxRules) + " rules");
    }
    if (needed) needed->push_back(known->second);
    return "v" + std::to_string(known->second);
  }

  void write(size_t index, const Conjunction& all) {
    const std::vector<Form> forms = schema_.forms(all, Schema::Reading::kWritten);
    std::string rule;
    std::vector<std::vector<size_t>> ways;
    impossible_.clear();
    std::vector<size_t> needed;
    const auto way = [&](const std::optional<std::string>& text) {
      if (!text) return needed.clear();
      rule += (ways.empty() ? "" : " | ") + *text;
      ways.push_back(std::exchange(needed, {}));
    };
    for (const Form& form : forms) {
      if (form.values) {
        for (const OrderedJson* value : *form.values) rule += (rule.empty() ? "" : " | ") + literal(value->dump());
        ways.emplace_back();
        continue;
      }
      if ((form.types & kObjectType) != 0) way(object(form, needed));
      if ((form.types & kArrayType) != 0) way(array(form, needed));
      if ((form.types & kStringType) != 0) way(string(form));
      if ((form.types & kNumberType) != 0) way(number(form));
      if ((form.types & kBooleanType) != 0) way(rules_.use("boolean"));
      if ((form.types & kNullType) != 0) way(rules_.use("null"));
      if (schema_.error()) return;
    }
    if (ways.empty())
      return refuse(impossible_.empty() ? path_of(all) : impossible_, "no value obeys all that is asked here");
    made_[index].ways = std::move(ways);
    rules_.add("v" + std::to_string(index), rule);
    if (rules_.too_large()) refuse(param_, "the schema's grammar is too large");
  }

  // A schema that needs itself inside itself has no text.
  void check_ends() {
    for (bool found = true; found;) {
      found = false;
      for (size_t i = made_.size(); i-- > 0;) {  // parts come behind what they are part of
        if (made_[i].ends) continue;
        const auto ends = [&](const std::vector<size_t>& needed) {
          return std::all_of(needed.begin(), needed.end(), [&](size_t n) { return made_[n].ends; });
        };
        found |= made_[i].ends = std::any_of(made_[i].ways.begin(), made_[i].ways.end(), ends);
      }
    }
    for (const Made& made : made_)
      if (!made.ends) return refuse(path_of(made.all), "no value obeys it: it needs itself inside itself");
  }

  // --- each type: nullopt, no value of it obeys ---
  std::optional<std::string> string(const Form& form) {
    const StringLimits limits = schema_.strings(form.all);
    if (schema_.error() || (limits.most && *limits.most < limits.least)) return std::nullopt;
    std::vector<const Automaton*> automata = limits.patterns;
    automata.insert(automata.end(), limits.formats.begin(), limits.formats.end());
    if (automata.empty()) {
      if (limits.least == 0 && !limits.most) return rules_.use("string");
      repeat(form, limits.most.value_or(limits.least));
      return add("\"\\\"\" " + rules_.use("char") + times(limits.least, limits.most.value_or(kNoEnd)) +
                 " \"\\\"\"");
    }
    std::optional<Automaton> all = *automata[0];
    for (size_t i = 1; all && i < automata.size(); ++i) all = product(*all, *automata[i]);
    if (all && (limits.least > 0 || limits.most)) all = product(*all, texts_of_length(limits.least, limits.most));
    const std::string text = texts(form, all);
    return text.empty() ? std::nullopt : std::optional("\"\\\"\" " + text + " \"\\\"\"");
  }

  std::optional<std::string> number(const Form& form) {
    const NumberLimits limits = schema_.numbers(form);
    if (schema_.error()) return std::nullopt;
    if (limits.plain()) return rules_.use(limits.whole ? "integer" : "number");
    const std::string text = texts(form, texts_of_numbers(limits));
    return text.empty() ? std::nullopt : std::optional(text);
  }

  std::optional<std::string> array(const Form& form, std::vector<size_t>& needed) {
    const ArrayLimits limits = schema_.arrays(form.all);
    if (schema_.error()) return std::nullopt;
    const auto n_prefix = int64_t(limits.prefix.size());
    // What the schema leaves open is written as it reads: a prefix whole, and nothing behind it.
    const int64_t open_end = limits.rest_given || n_prefix == 0 ? kNoEnd : n_prefix;
    int64_t most = limits.most.value_or(std::max(open_end, limits.least.value_or(0)));
    for (int64_t i = 0; i < std::min(n_prefix, most); ++i)
      if (!possible(limits.prefix[size_t(i)])) most = i;
    if (most > n_prefix && !possible(limits.rest)) most = n_prefix;
    const int64_t least = limits.least.value_or(std::min(n_prefix, most));
    if (schema_.error() || least > most) return std::nullopt;
    rules_.use("ws");

    // From the end to the beginning: what may follow the items before i.
    std::string rest;
    if (most > n_prefix) {
      const std::string item = value(limits.rest, least > n_prefix ? &needed : nullptr);
      repeat(form, most == kNoEnd ? least : most);
      const int64_t before = n_prefix == 0 ? 1 : 0;  // the first item has no comma
      const int64_t end = most == kNoEnd ? kNoEnd : most - n_prefix - before;
      rest = "(ws \",\" ws " + item + ")" + times(std::max<int64_t>(least - n_prefix - before, 0), end);
      if (n_prefix == 0) rest = optional(item + " " + rest, least == 0);
    }
    for (int64_t i = std::min(n_prefix, most) - 1; i >= 0; --i) {
      const std::string item = value(limits.prefix[size_t(i)], i < least ? &needed : nullptr);
      rest = add(optional((i > 0 ? "ws \",\" ws " : "") + item + " " + rest, i >= least));
    }
    return add("\"[\" ws " + rest + " ws \"]\"");
  }

  // Properties in the schema's order; those not required may be left out. `first` and `after` stand for what may
  // follow the properties before, when nothing and when something was written already.
  std::optional<std::string> object(const Form& form, std::vector<size_t>& needed) {
    const ObjectLimits limits = schema_.objects(form.all);
    if (schema_.error()) return std::nullopt;
    if (limits.properties.empty() && !limits.closed && limits.others.empty()) return rules_.use("object");
    rules_.use("ws");
    std::string first = "\"\"", after = "\"\"";
    if (limits.writes_others() && possible(limits.others)) {
      std::vector<std::string> names;
      for (const auto& property : limits.properties) names.push_back(property.name);
      const auto others = all_texts_but(names);
      if (!others)
        refuse(path_of(form.all) + ".additionalProperties", "the names in properties are too long for it");
      if (schema_.error()) return std::nullopt;
      const std::string name =
          names.empty() ? rules_.use("string") : "\"\\\"\" " + rules_.add(*others) + " \"\\\"\"";
      const std::string member = name + " ws \":\" ws " + value(limits.others);
      after = add("(ws \",\" ws " + member + ")*");
      first = add("(" + member + " " + after + ")?");
    }
    for (size_t i = limits.properties.size(); i-- > 0;) {
      const ObjectLimits::Property& property = limits.properties[i];
      if (!possible(property.value)) {
        if (property.required) impossible_ = property.path;
        if (schema_.error() || property.required) return std::nullopt;
        continue;
      }
      const std::string member = literal(OrderedJson(property.name).dump()) + " ws \":\" ws " +
                                 value(property.value, property.required ? &needed : nullptr) + " " + after;
      first = add(member + (property.required ? "" : " | " + first));
      after = add("ws \",\" ws " + member + (property.required ? "" : " | " + after));
      if (schema_.error()) return std::nullopt;
    }
    return add("\"{\" ws " + first + " ws \"}\"");
  }

  static std::string times(int64_t least, int64_t most) {
    return "{" + std::to_string(least) + "," + (most == kNoEnd ? "" : std::to_string(most)) + "}";
  }
  static std::string optional(const std::string& text, bool may_miss) {
    return may_miss ? "(" + text + ")?" : text;
  }
  void repeat(const Form& form, int64_t n) {
    n_repeats_ += n;
    if (n_repeats_ > kMaxRepeats) refuse(path_of(form.all), "the schema's lengths are too large together");
  }
  // Empty: no text.
  std::string texts(const Form& form, const std::optional<Automaton>& automaton) {
    if (!automaton) refuse(path_of(form.all), "what is asked of this value needs too many states together");
    if (!automaton || automaton->empty()) return "";
    std::string name = rules_.add(*automaton);
    if (rules_.too_large()) refuse(param_, "the schema's grammar is too large");
    return name;
  }

  Schema schema_;
  const std::string param_;
  GrammarRules rules_;
  std::vector<Made> made_;
  std::map<std::vector<const OrderedJson*>, size_t> known_;  // index of made_
  std::string impossible_;  // a property of the value that is being written, if it is required and has no value
  int n_pieces_ = 0;
  int64_t n_repeats_ = 0;
};

}  // namespace

std::string json_object_grammar() {
  GrammarRules rules;
  rules.add("root", rules.use("object") + " " + rules.use("ws"));
  return rules.text();
}

ApiResult<std::string> schema_grammar(const OrderedJson& schema, const std::string& param) {
  return JsonGrammar(schema, param).build();
}

}  // namespace pagedkv::server
