// What a JSON schema says: its references followed, and what must hold at once brought together.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "server/api_error.h"
#include "server/automaton.h"
#include "server/decimal.h"
#include "server/json_body.h"

namespace pagedkv::server {

struct Place {
  const OrderedJson* schema;  // inside the root
  std::string path;           // for errors
};
// Schemas that hold at once; none: any value.
using Conjunction = std::vector<Place>;

// Types of values, as bits. What JSON Schema calls number is both of the last.
using Types = unsigned;
inline constexpr Types kNullType = 1, kBooleanType = 2, kObjectType = 4, kArrayType = 8, kStringType = 16;
inline constexpr Types kWholeType = 32, kFractionType = 64, kNumberType = kWholeType | kFractionType,
                       kAnyType = 127;

// One way for a value to obey a conjunction, anyOf and oneOf decided.
struct Form {
  Types types = kAnyType;
  std::optional<std::vector<const OrderedJson*>> values;  // only these, of enum and const
  Conjunction all;      // whose other keywords hold; $ref, allOf, anyOf and oneOf in them are done with
  Conjunction none_of;  // the alternatives of oneOf that were not taken
};

struct StringLimits {
  int64_t least = 0;
  std::optional<int64_t> most;
  std::vector<const Automaton*> patterns, formats;
};

struct ArrayLimits {
  std::vector<Conjunction> prefix;
  Conjunction rest;  // items behind the prefix
  bool rest_given = false;
  std::optional<int64_t> least, most;
};

struct ObjectLimits {
  struct Property {
    std::string name, path;
    Conjunction value;
    bool required = false;
  };
  std::vector<Property> properties;  // in the schema's order, then names that are only required
  Conjunction others;                // values of further names
  bool closed = false;               // no further names: additionalProperties false
  bool opened = false;               // further names are spoken of
  // Without properties an object is anything, as everywhere; with them, only those: what is wanted of an answer.
  bool writes_others() const { return !closed && (opened || properties.empty()); }
};

// One thread. Bounded in time and memory whatever the schema is: what passes a limit is refused.
class Schema {
 public:
  // kWritten: the forms that answers are written in, a part of what is allowed: a schema that has properties and no
  // type means an object. kAllowed: all that is allowed; a string of a format may then be any, since a reader may
  // not look at it.
  enum class Reading { kWritten, kAllowed };

  // root must outlive it. path begins the errors' field names.
  Schema(const OrderedJson& root, std::string path) : root_(root), path_(std::move(path)) {}
  Conjunction whole() const { return {{&root_, path_}}; }

  // Empty: no value obeys, or an error.
  std::vector<Form> forms(const Conjunction& all, Reading reading);
  StringLimits strings(const Conjunction& all);
  NumberLimits numbers(const Form& form);
  ArrayLimits arrays(const Conjunction& all);
  ObjectLimits objects(const Conjunction& all);
  bool allows(const Conjunction& all, const OrderedJson& value, bool formats);

  // The first thing that cannot be obeyed. Once there is one, what the others return means nothing.
  const std::optional<ApiError>& error() const { return error_; }
  void refuse(const std::string& path, const std::string& what);

  static constexpr int64_t kMaxCount = 1000;  // minItems, maxLength, ...: each becomes part of the grammar

 private:
  struct Choice {
    const OrderedJson* list;
    std::string path;
    bool one;  // oneOf
  };

  bool spend(size_t work);
  bool known_keywords(const Place& place);
  std::optional<Place> target(const OrderedJson& ref, const std::string& path);
  std::vector<Place> in_place(const Place& place);
  int height(const Place& place, int depth);
  std::optional<std::vector<Choice>> expand(Conjunction& all, size_t from);
  void decide(Conjunction all, size_t from, std::vector<const OrderedJson*> decided, Reading reading,
              std::vector<Form>& out);
  void alternatives(const Conjunction& all, const Choice& choice, const std::vector<const OrderedJson*>& decided,
                    Reading reading, std::vector<Form>& out);
  void keep_one(std::vector<Form>& forms, const Choice& choice, size_t taken, Reading reading);
  std::optional<Form> form_of(const Conjunction& all, Reading reading);
  bool values_of(Form& form);
  std::optional<Types> types_of(const Place& place);
  std::optional<int64_t> count(const Place& place, const char* key);
  const Automaton* pattern(const OrderedJson& pattern, const std::string& path);
  const Automaton* format(const OrderedJson& format, const std::string& path);
  void number_keywords(const Place& place, NumberLimits& out);

  bool allows(const Form& form, const OrderedJson& value, bool formats);
  bool allows_string(const Form& form, const std::string& value, bool formats);
  bool allows_array(const Form& form, const OrderedJson& value, bool formats);
  bool allows_object(const Form& form, const OrderedJson& value, bool formats);

  // Does no value that `written` writes obey `allowed`? False when in doubt.
  bool apart(const Form& written, const Form& allowed, int depth);
  bool strings_apart(const Form& written, const Form& allowed);
  bool numbers_apart(const Form& written, const Form& allowed);
  bool objects_apart(const Form& written, const Form& allowed, int depth);
  std::optional<Automaton> strings_of(const Form& form, bool formats);

  const OrderedJson& root_;
  const std::string path_;
  std::optional<ApiError> error_;
  size_t work_ = 0;
  std::unordered_set<const OrderedJson*> checked_;       // their keywords are known
  std::unordered_map<std::string, Place> refs_;          // targets
  std::unordered_map<const OrderedJson*, int> heights_;  // -1: being measured
  std::map<std::string, Automaton> patterns_;            // by their text
};

}  // namespace pagedkv::server
