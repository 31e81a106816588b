#include "server/json_schema.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "server/pattern.h"

namespace pagedkv::server {
namespace {

constexpr size_t kMaxAtOnce = 200;
constexpr size_t kMaxForms = 256;
constexpr size_t kMaxReferences = 2000;
constexpr size_t kMaxWork = 1'500'000;  // about a second
constexpr size_t kMaxShown = 64;        // bytes of a schema's own words in an error

const std::set<std::string_view> kDescribes = {
    "title", "description", "default",    "examples",           "$schema",
    "$id",   "$comment",    "deprecated", "readOnly",           "writeOnly",
    "$defs", "definitions", "$anchor",    "format_description", "discriminator"};
const std::map<std::string_view, Types> kConcern = {{"properties", kObjectType},
                                                    {"required", kObjectType},
                                                    {"additionalProperties", kObjectType},
                                                    {"items", kArrayType},
                                                    {"prefixItems", kArrayType},
                                                    {"minItems", kArrayType},
                                                    {"maxItems", kArrayType},
                                                    {"minLength", kStringType},
                                                    {"maxLength", kStringType},
                                                    {"pattern", kStringType},
                                                    {"format", kAnyType},
                                                    {"minimum", kNumberType},
                                                    {"maximum", kNumberType},
                                                    {"exclusiveMinimum", kNumberType},
                                                    {"exclusiveMaximum", kNumberType},
                                                    {"multipleOf", kNumberType},
                                                    {"type", kAnyType},
                                                    {"enum", kAnyType},
                                                    {"const", kAnyType},
                                                    {"anyOf", kAnyType},
                                                    {"oneOf", kAnyType},
                                                    {"allOf", kAnyType},
                                                    {"$ref", kAnyType}};
const std::map<std::string_view, Types> kTypes = {
    {"null", kNullType},     {"boolean", kBooleanType}, {"object", kObjectType}, {"array", kArrayType},
    {"string", kStringType}, {"number", kNumberType},   {"integer", kWholeType}};

std::string cut(std::string_view text) { return shortened(text, kMaxShown); }
std::string shown(const OrderedJson& value) {
  if (value.is_structured() && !value.empty()) return value.is_array() ? "a list" : "an object";
  return cut(dump(value));
}

std::string at(const std::string& path, std::string_view name) { return path + "." + cut(name); }
std::string at(const std::string& path, std::string_view key, size_t i) {
  return path + "." + std::string(key) + "[" + std::to_string(i) + "]";
}

}  // namespace

void Schema::refuse(const std::string& path, const std::string& what) {
  if (!error_) error_ = ApiError{.message = what, .param = path};
}

bool Schema::spend(size_t work) {
  work_ += work;
  if (work_ > kMaxWork) refuse(path_, "the schema is too intricate: too much work to read it");
  return !error_;
}

// --- references, and what holds at once
// ---------------------------------------------------------------------------
bool Schema::known_keywords(const Place& place) {
  if (!checked_.insert(place.schema).second) return true;
  if (!place.schema->is_object()) {
    refuse(place.path, "a schema is an object or a boolean");
    return false;
  }
  for (const auto& [key, value] : place.schema->items()) {
    if (kConcern.contains(key) || kDescribes.contains(key)) continue;
    if (key == "uniqueItems" && value == false) continue;
    refuse(at(place.path, key),
           "the schema's keyword \"" + cut(key) + "\" is not supported here, and would not be obeyed");
    return false;
  }
  return true;
}

// What a $ref names, with a path of its own: those of long chains would grow.
std::optional<Place> Schema::target(const OrderedJson& ref, const std::string& path) {
  if (!ref.is_string()) {
    refuse(path, "$ref is a string");
    return std::nullopt;
  }
  const auto& name = ref.get_ref<const std::string&>();
  if (const auto known = refs_.find(name); known != refs_.end()) return known->second;
  if (refs_.size() >= kMaxReferences) {
    refuse(path, "there are more than " + std::to_string(kMaxReferences) + " different references");
    return std::nullopt;
  }
  if (!name.starts_with("#")) {
    refuse(path, "$ref is \"" + cut(name) + "\"; only #/... within the schema works");
    return std::nullopt;
  }
  try {
    std::string where = path_ + cut(name.substr(1));
    std::replace(where.begin() + std::ptrdiff_t(path_.size()), where.end(), '/', '.');
    return refs_.emplace(name, Place{&root_.at(OrderedJson::json_pointer(name.substr(1))), std::move(where)})
        .first->second;
  } catch (const OrderedJson::exception&) {
    refuse(path, "$ref is \"" + cut(name) + "\", which is not in the schema");
    return std::nullopt;
  }
}

// The schemas that speak of the same value as this one: by $ref, allOf, anyOf and oneOf.
std::vector<Place> Schema::in_place(const Place& place) {
  std::vector<Place> out;
  if (!place.schema->is_object()) return out;
  for (const auto& [key, value] : place.schema->items()) {
    if (key == "$ref") {
      if (auto to = target(value, place.path + ".$ref")) out.push_back(*std::move(to));
    } else if (key == "allOf" || key == "anyOf" || key == "oneOf") {
      if (!value.is_array() || value.empty()) refuse(at(place.path, key), "a list of schemas is expected");
      if (value.is_array())
        for (size_t i = 0; i < value.size(); ++i) out.push_back({&value[i], at(place.path, key, i)});
    }
  }
  return out;
}

// How deep those lie in each other; no schema may stand for itself.
int Schema::height(const Place& place, int depth) {
  const auto [known, added] = heights_.try_emplace(place.schema, -1);
  if (!added) {
    if (known->second < 0) refuse(place.path, "the schema refers to nothing but itself");
    return known->second;
  }
  int most = 0;
  for (const Place& inner : in_place(place)) {
    if (!spend(1)) break;
    if (depth < kMaxJsonDepth) most = std::max(most, 1 + height(inner, depth + 1));
    if (depth == kMaxJsonDepth || most > kMaxJsonDepth) refuse(inner.path, "the schema is nested too deeply");
  }
  return heights_[place.schema] = most;
}

// Follows $ref and allOf from the index `from` on, and tells what remains to be decided. nullopt: nothing obeys.
std::optional<std::vector<Schema::Choice>> Schema::expand(Conjunction& all, size_t from) {
  std::unordered_set<const OrderedJson*> seen;
  for (size_t i = 0; i < from; ++i) seen.insert(all[i].schema);
  Conjunction pending(std::make_move_iterator(all.begin() + std::ptrdiff_t(from)),
                      std::make_move_iterator(all.end()));
  all.resize(from);
  for (size_t i = 0; i < pending.size(); ++i) {  // it grows meanwhile
    const Place place = pending[i];
    if (!spend(1)) return std::nullopt;
    if (place.schema->is_boolean()) {
      if (!place.schema->get<bool>()) return std::nullopt;
      continue;
    }
    if (!seen.insert(place.schema).second) continue;
    if (!known_keywords(place)) return std::nullopt;
    if (height(place, 0); error_) return std::nullopt;
    if (const auto ref = place.schema->find("$ref"); ref != place.schema->end())
      pending.push_back(target(*ref, place.path + ".$ref").value());  // height() has followed it
    if (const auto list = place.schema->find("allOf"); list != place.schema->end())
      for (size_t k = 0; k < list->size(); ++k) pending.push_back({&(*list)[k], at(place.path, "allOf", k)});
    all.push_back(place);
    if (all.size() > kMaxAtOnce || pending.size() > 10 * kMaxAtOnce) {
      refuse(place.path, "more than " + std::to_string(kMaxAtOnce) + " schemas would hold at once");
      return std::nullopt;
    }
  }
  std::vector<Choice> choices;
  for (const Place& place : all)
    for (const char* key : {"anyOf", "oneOf"})
      if (const auto list = place.schema->find(key); list != place.schema->end())
        choices.push_back({&*list, at(place.path, key), std::string_view(key) == "oneOf"});
  return choices;
}

std::vector<Form> Schema::forms(const Conjunction& all, Reading reading) {
  std::vector<Form> out;
  decide(all, 0, {}, reading, out);
  if (error_) out.clear();
  return out;
}

void Schema::decide(Conjunction all, size_t from, std::vector<const OrderedJson*> decided, Reading reading,
                    std::vector<Form>& out) {
  if (error_) return;
  const auto choices = expand(all, from);
  if (!choices || error_) return;
  for (const Choice& choice : *choices) {
    if (std::find(decided.begin(), decided.end(), choice.list) != decided.end()) continue;
    decided.push_back(choice.list);
    return alternatives(all, choice, decided, reading, out);
  }
  if (out.size() >= kMaxForms)
    return refuse(all.empty() ? path_ : all[0].path,
                  "anyOf and oneOf leave more than " + std::to_string(kMaxForms) + " alternatives");
  if (auto form = form_of(all, reading)) out.push_back(*std::move(form));
}

void Schema::alternatives(const Conjunction& all, const Choice& choice,
                          const std::vector<const OrderedJson*>& decided, Reading reading, std::vector<Form>& out) {
  for (size_t i = 0; i < choice.list->size() && spend(all.size()); ++i) {
    Conjunction with = all;
    with.push_back({&(*choice.list)[i], choice.path + "[" + std::to_string(i) + "]"});
    std::vector<Form> taken;
    decide(std::move(with), all.size(), decided, reading, taken);
    if (choice.one) keep_one(taken, choice, i, reading);
    if (out.size() + taken.size() > kMaxForms)
      return refuse(choice.path, "more than " + std::to_string(kMaxForms) + " alternatives");
    std::move(taken.begin(), taken.end(), std::back_inserter(out));
  }
}

// oneOf: what is written as one alternative must obey no other.
void Schema::keep_one(std::vector<Form>& forms, const Choice& choice, size_t taken, Reading reading) {
  for (size_t i = 0; i < choice.list->size() && !error_; ++i) {
    if (i == taken) continue;
    const Place other{&(*choice.list)[i], choice.path + "[" + std::to_string(i) + "]"};
    std::vector<Form> others;
    if (reading == Reading::kWritten) others = this->forms({other}, Reading::kAllowed);
    for (Form& form : forms) {
      if (reading == Reading::kAllowed) {
        form.none_of.push_back(other);
        continue;
      }
      if (form.values) {
        std::erase_if(*form.values, [&](const OrderedJson* value) { return allows({other}, *value, false); });
        continue;
      }
      const bool one =
          std::all_of(others.begin(), others.end(), [&](const Form& allowed) { return apart(form, allowed, 0); });
      if (!one)
        return refuse(choice.path, "alternatives " + std::to_string(taken) + " and " + std::to_string(i) +
                                       " of oneOf may both hold for a value; anyOf allows that");
    }
  }
  std::erase_if(forms, [](const Form& form) { return form.values && form.values->empty(); });
}

std::optional<Form> Schema::form_of(const Conjunction& all, Reading reading) {
  Form form{.all = all};
  Types implied = 0;
  bool typed = false;
  for (const Place& place : all) {
    const auto types = types_of(place);
    if (!types) return std::nullopt;
    form.types &= *types;
    for (const auto& [key, value] : place.schema->items()) {
      typed |= key == "type" || key == "enum" || key == "const";
      const auto concern = kConcern.find(key);
      if (key == "format") {
        implied |= kStringType;
      } else if (concern != kConcern.end() && concern->second != kAnyType) {
        implied |= concern->second;
      }
    }
  }
  if (!values_of(form)) return std::nullopt;
  if (reading == Reading::kWritten && !typed && implied != 0) form.types &= implied;
  if (form.types == 0 || form.types == kFractionType) return std::nullopt;
  return form;
}

// Reads enum and const. False: no value is left.
bool Schema::values_of(Form& form) {
  for (const Place& place : form.all) {
    for (const char* key : {"enum", "const"}) {
      const auto found = place.schema->find(key);
      if (found == place.schema->end()) continue;
      std::vector<const OrderedJson*> values;
      if (key == std::string_view("const")) {
        values.push_back(&*found);
      } else if (!found->is_array() || found->empty()) {
        refuse(at(place.path, key), "enum is a list of values");
      } else {
        for (const OrderedJson& value : *found) values.push_back(&value);
      }
      if (!spend(values.size())) return false;
      if (form.values) {
        std::set<Json> before;
        for (const OrderedJson* value : *form.values) before.insert(Json(*value));
        std::erase_if(values, [&](const OrderedJson* value) { return !before.contains(Json(*value)); });
      }
      form.values = std::move(values);
    }
  }
  if (!form.values) return true;
  Form rest = form;
  rest.values.reset();
  std::erase_if(*form.values, [&](const OrderedJson* value) { return !allows(rest, *value, true); });
  return !form.values->empty();
}

// --- keywords
// -----------------------------------------------------------------------------------------------------
std::optional<Types> Schema::types_of(const Place& place) {
  const auto type = place.schema->find("type");
  if (type == place.schema->end()) return kAnyType;
  const auto one = [&](const OrderedJson& name) -> Types {
    const auto known = name.is_string() ? kTypes.find(name.get_ref<const std::string&>()) : kTypes.end();
    if (known != kTypes.end()) return known->second;
    refuse(place.path + ".type",
           "type is " + shown(name) + "; allowed are object, array, string, integer, number, boolean, null");
    return 0;
  };
  Types types = 0;
  if (type->is_array()) {
    if (type->empty()) refuse(place.path + ".type", "type is an empty list");
    for (const OrderedJson& name : *type) {
      types |= one(name);
      if (error_) break;
    }
  } else {
    types = one(*type);
  }
  return error_ ? std::nullopt : std::optional(types);
}

std::optional<int64_t> Schema::count(const Place& place, const char* key) {
  const auto found = place.schema->find(key);
  if (found == place.schema->end()) return std::nullopt;
  if (!found->is_number_integer() || *found < 0 || *found > kMaxCount) {
    refuse(at(place.path, key), std::string(key) + " is " + shown(*found) + ", a whole number from 0 to " +
                                    std::to_string(kMaxCount) + " is expected");
    return std::nullopt;
  }
  return found->get<int64_t>();
}

const Automaton* Schema::pattern(const OrderedJson& pattern, const std::string& path) {
  if (!pattern.is_string()) {
    refuse(path, "pattern is " + shown(pattern) + ", a regular expression is expected");
    return nullptr;
  }
  const auto& text = pattern.get_ref<const std::string&>();
  const auto [known, added] = patterns_.try_emplace(text);
  if (!added) return &known->second;
  auto automaton = pattern_automaton(text);
  if (!automaton.ok()) {
    refuse(path, automaton.status().message() + ", in \"" + cut(text) + "\"");
    return nullptr;
  }
  known->second = *std::move(automaton);
  return spend(100 * known->second.states.size()) ? &known->second : nullptr;
}

const Automaton* Schema::format(const OrderedJson& format, const std::string& path) {
  const auto text = format.is_string() ? format_pattern(format.get_ref<const std::string&>()) : std::nullopt;
  if (!text) {
    refuse(path, "format is " + shown(format) + "; of strings, date, time, date-time and uuid work here");
    return nullptr;
  }
  return pattern(OrderedJson(*text), path);
}

StringLimits Schema::strings(const Conjunction& all) {
  StringLimits out;
  for (const Place& place : all) {
    if (const auto least = count(place, "minLength")) out.least = std::max(out.least, *least);
    if (const auto most = count(place, "maxLength")) out.most = std::min(out.most.value_or(*most), *most);
    if (const auto found = place.schema->find("pattern"); found != place.schema->end())
      out.patterns.push_back(pattern(*found, place.path + ".pattern"));
    if (const auto found = place.schema->find("format"); found != place.schema->end())
      out.formats.push_back(format(*found, place.path + ".format"));
    if (error_) return {};
  }
  return out;
}

void Schema::number_keywords(const Place& place, NumberLimits& out) {
  const auto read = [&](const char* key) -> std::optional<Decimal> {
    const auto found = place.schema->find(key);
    if (found == place.schema->end()) return std::nullopt;
    auto value = decimal(*found);
    if (!value) refuse(at(place.path, key), std::string(key) + " is " + shown(*found) + ", a number is expected");
    return value;
  };
  for (const bool exclusive : {false, true}) {
    if (auto low = read(exclusive ? "exclusiveMinimum" : "minimum")) out.at_least({*std::move(low), exclusive});
    if (auto high = read(exclusive ? "exclusiveMaximum" : "maximum")) out.at_most({*std::move(high), exclusive});
  }
  if (auto multiple = read("multipleOf")) {
    if (!units(*multiple))
      return refuse(place.path + ".multipleOf", "multipleOf is " + shown(place.schema->at("multipleOf")) +
                                                    "; works are those above 0 with up to " +
                                                    std::to_string(kMaxMultiple) +
                                                    " units of their last digit, and powers of ten");
    out.multiples.push_back(*std::move(multiple));
  }
  const auto format = place.schema->find("format");
  if (format == place.schema->end() || *format == "int64" || *format == "double" || *format == "float") return;
  if (*format == "int32") {
    out.at_least({{.negative = true, .whole = "2147483648"}});
    out.at_most({{.whole = "2147483647"}});
  } else if (!format->is_string() || !format_pattern(format->get_ref<const std::string&>())) {
    refuse(place.path + ".format", "format is " + shown(*format) +
                                       "; of numbers, int32, int64, float and double "
                                       "work here");
  }
}

NumberLimits Schema::numbers(const Form& form) {
  NumberLimits out{.whole = (form.types & kFractionType) == 0};
  for (const Place& place : form.all) number_keywords(place, out);
  return out;
}

ArrayLimits Schema::arrays(const Conjunction& all) {
  ArrayLimits out;
  size_t n_prefix = 0;
  for (const Place& place : all) {
    if (const auto least = count(place, "minItems")) out.least = std::max(out.least.value_or(0), *least);
    if (const auto most = count(place, "maxItems")) out.most = std::min(out.most.value_or(*most), *most);
    if (const auto prefix = place.schema->find("prefixItems"); prefix != place.schema->end()) {
      if (!prefix->is_array() || prefix->empty() || prefix->size() > size_t(kMaxCount)) {
        refuse(place.path + ".prefixItems",
               "a list of up to " + std::to_string(kMaxCount) + " schemas is expected");
        return {};
      }
      n_prefix = std::max(n_prefix, prefix->size());
    }
  }
  if (error_ || !spend(n_prefix * all.size())) return {};
  out.prefix.resize(n_prefix);
  for (const Place& place : all) {
    const auto prefix = place.schema->find("prefixItems"), items = place.schema->find("items");
    const bool has_items = items != place.schema->end();
    const size_t n = prefix == place.schema->end() ? 0 : prefix->size();
    for (size_t i = 0; i < n_prefix; ++i) {
      if (i < n) {
        out.prefix[i].push_back({&(*prefix)[i], at(place.path, "prefixItems", i)});
      } else if (has_items) {
        out.prefix[i].push_back({&*items, place.path + ".items"});
      }
    }
    if (has_items) out.rest.push_back({&*items, place.path + ".items"});
    out.rest_given |= has_items;
  }
  return out;
}

ObjectLimits Schema::objects(const Conjunction& all) {
  ObjectLimits out;
  using Declared = std::unordered_map<std::string_view, const OrderedJson*>;
  std::vector<Declared> declared(all.size());
  std::unordered_map<std::string_view, size_t> index;  // of out.properties
  const auto property = [&](const std::string& name, const std::string& path) -> ObjectLimits::Property& {
    const auto [found, added] = index.try_emplace(name, out.properties.size());
    if (added) out.properties.push_back({.name = name, .path = path});
    return out.properties[found->second];
  };
  for (size_t i = 0; i < all.size(); ++i) {
    const auto properties = all[i].schema->find("properties");
    if (properties == all[i].schema->end()) continue;
    if (!properties->is_object()) refuse(all[i].path + ".properties", "properties is an object");
    if (error_ || !spend(properties->size())) return {};
    for (const auto& [name, value] : properties->items()) {
      declared[i].emplace(name, &value);
      property(name, at(all[i].path + ".properties", name));
    }
  }
  for (const Place& place : all) {
    const auto required = place.schema->find("required");
    if (required == place.schema->end()) continue;
    if (!required->is_array() || !spend(required->size())) {
      refuse(place.path + ".required", "required is a list of names");
      return {};
    }
    for (const OrderedJson& name : *required) {
      if (!name.is_string()) {
        refuse(place.path + ".required", "required names " + shown(name) + ", which is no string");
        return {};
      }
      property(name.get_ref<const std::string&>(), place.path + ".required").required = true;
    }
  }
  if (!spend(out.properties.size() * all.size())) return {};
  for (size_t i = 0; i < all.size(); ++i) {
    const auto more = all[i].schema->find("additionalProperties");
    const bool has_more = more != all[i].schema->end();
    const std::string path = all[i].path + ".additionalProperties";
    for (ObjectLimits::Property& p : out.properties) {
      if (const auto found = declared[i].find(p.name); found != declared[i].end()) {
        p.value.push_back({found->second, at(all[i].path + ".properties", p.name)});
      } else if (has_more) {
        p.value.push_back({&*more, path});
      }
    }
    if (!has_more) continue;
    out.opened = true;
    if (more->is_boolean()) {
      out.closed |= !more->get<bool>();
    } else {
      out.others.push_back({&*more, path});
    }
  }
  return out;
}

}  // namespace pagedkv::server
