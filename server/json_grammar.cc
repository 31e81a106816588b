#include "server/json_grammar.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace pagedkv::server {
namespace {

constexpr int64_t kMaxRepeat = 1000;  // minItems, maxLength, ...: each becomes part of the grammar
constexpr size_t kMaxRules = 2000;

// Rules that schemas share. White space is limited: a model that may write endless blanks sometimes does.
const std::map<std::string, std::string> kPrimitives = {
    {"ws", R"x(| " " | "\n" [ \t]{0,20})x"},
    {"char", R"x([^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4}))x"},
    {"string", R"x("\"" char* "\"")x"},
    {"integral", R"x([0] | [1-9] [0-9]{0,15})x"},
    {"integer", R"x("-"? integral)x"},
    {"number", R"x("-"? integral ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})?)x"},
    {"boolean", R"x("true" | "false")x"},
    {"null", R"x("null")x"},
    {"value", R"x(object | array | string | number | boolean | null)x"},
    {"object", R"x("{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? ws "}")x"},
    {"array", R"x("[" ws (value (ws "," ws value)*)? ws "]")x"},
};
// What each of them names.
const std::map<std::string, std::vector<std::string>> kNeeds = {
    {"string", {"char"}},
    {"integer", {"integral"}},
    {"number", {"integral"}},
    {"value", {"object", "array", "string", "number", "boolean", "null"}},
    {"object", {"ws", "string", "value"}},
    {"array", {"ws", "value"}},
};

const std::set<std::string> kDescribes = {"title", "description", "default",    "examples",          "$schema",
                                          "$id",   "$comment",    "deprecated", "readOnly",          "writeOnly",
                                          "$defs", "definitions", "$anchor",    "format_description"};

// A GBNF literal that matches `text`.
std::string literal(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else {
      out += c;
    }
  }
  return out + "\"";
}

class Grammar {
 public:
  explicit Grammar(const OrderedJson& schema, std::string param) : root_(schema), param_(std::move(param)) {}

  ApiResult<std::string> build() {
    const std::string body = rule_of(root_, param_);
    if (error_) return *error_;
    rules_["root"] = body + " ws";
    use("ws");
    std::string text;
    for (const auto& [name, rule] : rules_) text += name + " ::= " + rule + "\n";
    return text;
  }

 private:
  std::string refuse(const std::string& where, const std::string& what) {
    if (!error_) error_ = ApiError{.message = what, .param = where};
    return "null";
  }

  std::string use(const std::string& name) {
    if (!rules_.emplace(name, kPrimitives.at(name)).second) return name;
    if (const auto needs = kNeeds.find(name); needs != kNeeds.end())
      for (const std::string& other : needs->second) use(other);
    return name;
  }

  std::string add(const std::string& rule) {
    if (rules_.size() >= kMaxRules) return refuse(param_, "the schema needs more than 2000 rules");
    std::string name = "r" + std::to_string(++last_);
    rules_[name] = rule;
    return name;
  }

  // A number of the schema within 0 .. kMaxRepeat.
  std::optional<int64_t> count(const OrderedJson& schema, const char* key, const std::string& where) {
    const auto found = schema.find(key);
    if (found == schema.end()) return std::nullopt;
    if (!found->is_number_integer() || *found < 0 || *found > kMaxRepeat) {
      refuse(where + "." + key, std::string(key) + " is " + found->dump() + ", a whole number from 0 to " +
                                    std::to_string(kMaxRepeat) + " is expected");
      return std::nullopt;
    }
    return found->get<int64_t>();
  }

  // Only these keys, beside those that describe.
  bool only(const OrderedJson& schema, const std::set<std::string>& known, const std::string& where) {
    for (const auto& [key, value] : schema.items()) {
      if (known.contains(key) || kDescribes.contains(key)) continue;
      refuse(where + "." + key,
             "the schema's keyword \"" + key + "\" is not supported here, and would not be obeyed");
      return false;
    }
    return true;
  }

  std::string alternatives(const OrderedJson& list, const std::string& where) {
    if (!list.is_array() || list.empty()) return refuse(where, "a list of schemas is expected");
    std::string rule;
    for (size_t i = 0; i < list.size(); ++i)
      rule += (i > 0 ? " | " : "") + rule_of(list[i], where + "[" + std::to_string(i) + "]");
    return add(rule);
  }

  // The name of a rule, or a piece of one that stands for itself, for a schema.
  std::string rule_of(const OrderedJson& schema, const std::string& where) {
    if (error_) return "null";
    if (++depth_ > kMaxJsonDepth) return refuse(where, "the schema is nested too deeply");
    std::string rule = read(schema, where);
    --depth_;
    return rule;
  }

  std::string read(const OrderedJson& schema, const std::string& where) {
    if (schema.is_boolean() && schema.get<bool>()) return use("value");
    if (!schema.is_object()) return refuse(where, "a schema is an object");
    if (const auto ref = schema.find("$ref"); ref != schema.end()) return reference(*ref, where + ".$ref");
    if (const auto value = schema.find("const"); value != schema.end()) {
      if (!only(schema, {"const", "type"}, where)) return "null";
      return add(literal(value->dump()));
    }
    if (const auto values = schema.find("enum"); values != schema.end()) {
      if (!only(schema, {"enum", "type"}, where)) return "null";
      if (!values->is_array() || values->empty()) return refuse(where + ".enum", "enum is a list of values");
      std::string rule;
      for (const OrderedJson& value : *values) rule += (rule.empty() ? "" : " | ") + literal(value.dump());
      return add(rule);
    }
    for (const char* key : {"anyOf", "oneOf"}) {
      const auto list = schema.find(key);
      if (list == schema.end()) continue;
      return only(schema, {key}, where) ? alternatives(*list, where + "." + key) : "null";
    }
    if (const auto list = schema.find("allOf"); list != schema.end()) {
      if (!only(schema, {"allOf"}, where)) return "null";
      if (!list->is_array() || list->size() != 1)
        return refuse(where + ".allOf", "allOf of more than one schema is not supported here");
      return rule_of((*list)[0], where + ".allOf[0]");
    }
    const auto type = schema.find("type");
    if (type == schema.end()) {
      if (schema.contains("properties")) return object(schema, where);
      if (schema.contains("items")) return array(schema, where);
      return only(schema, {}, where) ? use("value") : "null";
    }
    if (type->is_array()) {
      std::string rule;
      for (const OrderedJson& one : *type) {
        OrderedJson single = schema;
        single["type"] = one;
        // Keywords of the other types do not concern this one.
        if (one != "object")
          single.erase("properties"), single.erase("required"), single.erase("additionalProperties");
        if (one != "array")
          for (const char* key : {"items", "prefixItems", "minItems", "maxItems"}) single.erase(key);
        if (one != "string") single.erase("minLength"), single.erase("maxLength");
        rule += (rule.empty() ? "" : " | ") + rule_of(single, where);
      }
      return rule.empty() ? refuse(where + ".type", "type is an empty list") : add(rule);
    }
    if (*type == "object") return object(schema, where);
    if (*type == "array") return array(schema, where);
    if (*type == "string") return string(schema, where);
    if (*type == "integer") {
      if (!only(schema, {"type", "minimum"}, where)) return "null";
      const auto minimum = schema.find("minimum");
      if (minimum == schema.end()) return use("integer");
      if (*minimum == 0) return use("integral");
      return refuse(where + ".minimum", "minimum is " + minimum->dump() + "; only 0 is supported here");
    }
    for (const char* name : {"number", "boolean", "null"})
      if (*type == name) return only(schema, {"type"}, where) ? use(name) : "null";
    return refuse(where + ".type", "type is " + type->dump() +
                                       "; allowed are object, array, string, integer, number, boolean, null");
  }

  std::string reference(const OrderedJson& ref, const std::string& where) {
    if (!ref.is_string()) return refuse(where, "$ref is a string");
    const std::string path = ref.get<std::string>();
    if (const auto known = references_.find(path); known != references_.end()) return known->second;
    if (!path.starts_with("#"))
      return refuse(where, "$ref is \"" + path + "\"; only #/... within the schema works");
    const OrderedJson* target = nullptr;
    try {
      target = &root_.at(OrderedJson::json_pointer(path.substr(1)));
    } catch (const OrderedJson::exception&) {
      return refuse(where, "$ref is \"" + path + "\", which is not in the schema");
    }
    std::string name = "d" + std::to_string(references_.size() + 1);
    references_[path] = name;  // before it is read: it may name itself
    const std::string rule = rule_of(*target, where);
    if (rule == name) return refuse(where, "$ref \"" + path + "\" is nothing but itself");
    rules_[name] = rule;
    return name;
  }

  std::string string(const OrderedJson& schema, const std::string& where) {
    if (!only(schema, {"type", "minLength", "maxLength"}, where)) return "null";
    const auto least = count(schema, "minLength", where), most = count(schema, "maxLength", where);
    if (!least && !most) return use("string");
    if (most && least.value_or(0) > *most) return refuse(where, "minLength is larger than maxLength");
    use("char");
    return add("\"\\\"\" char{" + std::to_string(least.value_or(0)) + "," + (most ? std::to_string(*most) : "") +
               "} \"\\\"\"");
  }

  std::string array(const OrderedJson& schema, const std::string& where) {
    if (!only(schema, {"type", "items", "prefixItems", "minItems", "maxItems"}, where)) return "null";
    use("ws");
    if (const auto prefix = schema.find("prefixItems"); prefix != schema.end()) {
      if (!prefix->is_array() || prefix->empty())
        return refuse(where + ".prefixItems", "a list of schemas is expected");
      std::string rule = "\"[\" ws ";
      for (size_t i = 0; i < prefix->size(); ++i)
        rule += (i > 0 ? " ws \",\" ws " : "") +
                rule_of((*prefix)[i], where + ".prefixItems[" + std::to_string(i) + "]");
      return add(rule + " ws \"]\"");
    }
    const std::string item = schema.contains("items") ? rule_of(schema["items"], where + ".items") : use("value");
    const int64_t least = count(schema, "minItems", where).value_or(0);
    const auto most = count(schema, "maxItems", where);
    if (most && least > *most) return refuse(where, "minItems is larger than maxItems");
    if (most && *most == 0) return add("\"[\" ws \"]\"");
    const std::string rest = "(ws \",\" ws " + item + "){" + std::to_string(least > 0 ? least - 1 : 0) + "," +
                             (most ? std::to_string(*most - 1) : "") + "}";
    const std::string items = item + " " + rest;
    return add("\"[\" ws " + (least > 0 ? items : "(" + items + ")?") + " ws \"]\"");
  }

  // Properties in the schema's order; those not required may be left out. Rule i stands for what may follow after
  // the properties before i, with a comma in front when something was written already.
  std::string object(const OrderedJson& schema, const std::string& where) {
    if (!only(schema, {"type", "properties", "required", "additionalProperties"}, where)) return "null";
    use("ws");
    const OrderedJson none = OrderedJson::object();
    const OrderedJson& properties = schema.contains("properties") ? schema["properties"] : none;
    if (!properties.is_object()) return refuse(where + ".properties", "properties is an object");
    std::set<std::string> required;
    if (const auto list = schema.find("required"); list != schema.end()) {
      if (!list->is_array()) return refuse(where + ".required", "required is a list of names");
      for (const OrderedJson& name : *list) {
        if (!name.is_string() || !properties.contains(name.get<std::string>()))
          return refuse(where + ".required", "required names " + name.dump() + ", which is not in properties");
        required.insert(name.get<std::string>());
      }
    }
    const auto more = schema.find("additionalProperties");
    // Without properties an object is anything, as everywhere; with them, only those: what is wanted of an answer.
    std::string extra;
    if (more != schema.end() && !(more->is_boolean() && !more->get<bool>())) {
      extra = more->is_boolean() ? use("value") : rule_of(*more, where + ".additionalProperties");
    } else if (more == schema.end() && properties.empty()) {
      return use("object");
    }
    std::string tail_first, tail_after;  // further members: as the first ones, after others
    if (!extra.empty()) {
      use("string");
      const std::string member = "string ws \":\" ws " + extra;
      tail_after = add("(ws \",\" ws " + member + ")*");
      tail_first = add("(" + member + " " + tail_after + ")?");
    }
    std::vector<std::pair<std::string, std::string>> members;  // name, rule of the value
    for (const auto& [name, value] : properties.items())
      members.emplace_back(name, rule_of(value, where + ".properties." + name));
    // From the last property to the first: rules for "nothing written yet" and "something written".
    std::string first = tail_first.empty() ? "\"\"" : tail_first, after = tail_after.empty() ? "\"\"" : tail_after;
    std::reverse(members.begin(), members.end());
    for (const auto& [name, value] : members) {
      const std::string pair = literal(OrderedJson(name).dump()) + " ws \":\" ws " + value;
      const bool needed = required.contains(name);
      const std::string new_first = pair + " " + after + (needed ? "" : " | " + first);
      const std::string new_after = "ws \",\" ws " + pair + " " + after + (needed ? "" : " | " + after);
      first = add(new_first);
      after = add(new_after);
    }
    return add("\"{\" ws " + first + " ws \"}\"");
  }

  const OrderedJson& root_;
  const std::string param_;
  std::map<std::string, std::string> rules_;
  std::map<std::string, std::string> references_;  // path -> rule
  std::optional<ApiError> error_;
  int last_ = 0, depth_ = 0;
};

}  // namespace

std::string json_object_grammar() {
  std::string text = "root ::= object ws\n";
  for (const auto& [name, rule] : kPrimitives) {
    if (name == "integer") continue;
    text += name + " ::= " + rule + "\n";
  }
  return text;
}

ApiResult<std::string> schema_grammar(const OrderedJson& schema, const std::string& param) {
  return Grammar(schema, param).build();
}

}  // namespace pagedkv::server
