#!/usr/bin/env python3
"""JSON schemas: every answer that a schema's grammar derives obeys the schema, as Python's `jsonschema` judges; what
cannot be obeyed is refused by its name. Answers are drawn at random, from the grammars alone."""
import datetime
import json
import os
import subprocess
import time
import unittest
from decimal import Decimal

from served import patient

try:
    import jsonschema
except ImportError:
    jsonschema = None

ANSWERS = 40
INT = {"type": "integer"}
TEXT = {"type": "string"}


def object_of(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


NODE = {"$defs": {"node": {"type": "object", "properties": {"v": INT, "next": {"anyOf": [{"$ref": "#/$defs/node"},
        {"type": "null"}]}}, "required": ["v"], "additionalProperties": False}}, "$ref": "#/$defs/node"}
WORD = {"$defs": {"word": {"type": "string", "minLength": 2}}}
PERSON = {"$defs": {"person": object_of(["name"], name=TEXT, age=INT)}}
CAT = object_of(["kind", "lives"], kind={"const": "cat"}, lives=INT)
DOG = object_of(["kind"], kind={"const": "dog"}, good={"type": "boolean"})

OBEYED = [
    # references beside other keywords
    {**WORD, "$ref": "#/$defs/word", "maxLength": 3},
    {**WORD, "$ref": "#/$defs/word", "enum": ["a", "bc", "def"]},
    {**WORD, "$ref": "#/$defs/word", "pattern": "^[ab]+$"},
    {**WORD, "$ref": "#/$defs/word", "type": ["string", "null"]},
    {**PERSON, "$ref": "#/$defs/person", "required": ["age"]},
    {**PERSON, "$ref": "#/$defs/person", "properties": {"email": TEXT, "age": {"minimum": 18}}, "required": ["email"]},
    {**PERSON, "type": "array", "items": {"$ref": "#/$defs/person", "description": "one"}, "minItems": 1},
    NODE,
    {"allOf": [object_of(["a"], a=INT), object_of(["b"], b=TEXT)]},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]},
    {"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string", "maxLength": 4},
    # arrays
    {"type": "array", "prefixItems": [INT, TEXT]},
    {"type": "array", "prefixItems": [INT, TEXT], "items": False},
    {"type": "array", "prefixItems": [INT, TEXT], "minItems": 1},
    {"type": "array", "prefixItems": [INT, TEXT], "minItems": 4},
    {"type": "array", "prefixItems": [INT, TEXT, INT], "maxItems": 2},
    {"type": "array", "prefixItems": [INT], "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5},
    {"type": "array", "prefixItems": [INT, False]},
    {"type": "array", "items": INT, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 0},
    {"items": {"items": INT}, "maxItems": 3},
    # enum, const, type
    {"type": "string", "enum": ["a", 1, None]},
    {"type": "integer", "enum": [1, 2.5, 3.0, "x"]},
    {"type": ["string", "null"], "const": None},
    {"enum": ["abc", "abcd", "b"], "minLength": 3, "maxLength": 3},
    {"enum": [{"a": 1}, {"a": "x"}, [1], 5], "properties": {"a": INT}, "type": ["object", "integer"]},
    {"enum": ["a\"b\\c\n", "\u00e9\U0001f600", ""]},
    {"enum": [1, 2, 3], "allOf": [{"enum": [3, 2, 9]}]},
    {"type": ["integer", "string", "null"], "minLength": 1, "maxLength": 2, "minimum": 5, "maximum": 7},
    # alternatives
    {"oneOf": [INT, TEXT]},
    {"oneOf": [CAT, DOG]},
    {"oneOf": [{"const": 1}, {"const": 2, "title": "two"}]},
    {"oneOf": [{"enum": [1, 2, 3]}, {"enum": [3, 4]}]},
    {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4, "maximum": 9}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^x{3}$"}]},
    {"oneOf": [object_of(["a"], a=INT), object_of(["b"], b=INT)]},
    {"oneOf": [{"type": "array", "items": INT, "maxItems": 2}, {"type": "array", "items": INT, "minItems": 3}]},
    {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 100, "maximum": 120}]},
    {"anyOf": [{"properties": {"a": INT}, "required": ["a"]}, {"required": ["b"]}], "type": "object",
     "properties": {"a": {}, "b": TEXT}},
    # further properties
    {"type": "object", "properties": {"a": INT, "ab": INT}, "additionalProperties": TEXT},
    {"type": "object", "properties": {"\u00e9\"\\": INT, "": INT}, "required": [""], "additionalProperties": {}},
    {"type": "object", "additionalProperties": {"type": "number"}},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "properties": {"a": False, "b": INT}},
    {"type": "object", "required": ["x", "y"], "properties": {"y": INT}},
    {"type": "object", "required": ["x"], "additionalProperties": {"type": "null"}},
    {"allOf": [{"properties": {"a": INT}, "additionalProperties": False}, {"properties": {"a": {"minimum": 2},
                                                                                          "b": INT}}]},
    # numbers
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 1, "maximum": 65535, "multipleOf": 5},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "multipleOf": 1000},
    {"type": "integer", "minimum": 5000},
    {"type": "integer", "maximum": -98765},
    {"type": "integer", "minimum": 0.5, "maximum": 2.5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -0.25, "exclusiveMaximum": 12.5},
    {"type": "number", "multipleOf": 0.01, "minimum": 0},
    {"type": "number", "multipleOf": 0.25, "maximum": 10, "minimum": -10},
    {"type": "number", "multipleOf": 2, "allOf": [{"multipleOf": 3}]},
    {"type": "number", "minimum": 1e-7, "maximum": 3e-7},
    {"type": "integer", "format": "int32"},
    # strings
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{2,3}-\\d+$"},
    {"type": "string", "pattern": "^(foo|ba[rz])?$"},
    {"type": "string", "pattern": "x"},
    {"type": "string", "pattern": "^a|b$", "maxLength": 6},
    {"type": "string", "pattern": "(^|,)q(,|$)", "maxLength": 9},
    {"type": "string", "pattern": "^[^a-y]*?z+$", "minLength": 3, "maxLength": 12},
    {"type": "string", "pattern": "^\\+?[0-9]{1,3}([ .-]?[0-9]{2,4}){2,3}$"},
    {"type": "string", "pattern": "^[\\w.]+@(?:[a-z0-9]+\\.)+[a-z]{2,4}$"},
    {"type": "string", "pattern": "^[\"\\\\/\\n\\t\\x01\\u00e9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "date", "pattern": "^2024-02"},
    True,
    {},
    {"title": "any", "default": None},
]

REFUSED = [
    ("schema.not", {"not": INT}),
    ("schema.patternProperties", {"type": "object", "patternProperties": {"^x": INT}}),
    ("schema.uniqueItems", {"type": "array", "uniqueItems": True}),
    ("schema.if", {"if": INT, "then": TEXT}),
    ("schema.properties.a.minProperties", object_of(a={"type": "object", "minProperties": 1})),
    ("schema.items.contains", {"items": {"contains": INT}}),
    ("schema", {"type": "string", "const": 1}),
    ("schema", {"type": "string", "enum": [1, 2]}),
    ("schema", False),
    ("schema", {"type": "integer", "minimum": 3, "maximum": 2}),
    ("schema", {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}),
    ("schema", {"type": "string", "minLength": 3, "maxLength": 2}),
    ("schema", {"type": "string", "pattern": "^a$", "minLength": 2}),
    ("schema.properties.a", object_of(["a"], a={"allOf": [INT, TEXT]})),
    ("schema.required", {"type": "object", "required": ["x"], "additionalProperties": False}),
    ("schema", {"type": "array", "prefixItems": [INT], "items": False, "minItems": 2}),
    ("schema.oneOf", {"oneOf": [INT, {"type": "number"}]}),
    ("schema.oneOf", {"oneOf": [object_of(a=INT), object_of(b=INT)]}),
    ("schema.oneOf", {"oneOf": [TEXT, {"properties": {"a": INT}}]}),
    ("schema.oneOf", {"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}]}),
    ("schema.pattern", {"type": "string", "pattern": "(a)\\1"}),
    ("schema.pattern", {"type": "string", "pattern": "a(?=b)"}),
    ("schema.pattern", {"type": "string", "pattern": "\\bword"}),
    ("schema.pattern", {"type": "string", "pattern": "\\p{L}"}),
    ("schema.pattern", {"type": "string", "pattern": "(a"}),
    ("schema.pattern", {"type": "string", "pattern": "^([ab]*a[ab]{20}){3}$"}),
    ("schema.pattern", {"type": "string", "pattern": 5}),
    ("schema.format", {"type": "string", "format": "email"}),
    ("schema.multipleOf", {"type": "number", "multipleOf": 0}),
    ("schema.multipleOf", {"type": "integer", "multipleOf": 501}),
    ("schema.minimum", {"type": "integer", "minimum": "3"}),
    ("schema.exclusiveMinimum", {"type": "integer", "minimum": 3, "exclusiveMinimum": True}),
    ("schema.items", {"items": [INT]}),
    ("schema.$ref", {"$ref": "#/$defs/none"}),
    ("schema.$ref", {"$ref": "https://example.com/schema"}),
    ("schema", {"$ref": "#"}),
    ("schema", {"anyOf": [{"$ref": "#"}, INT]}),
    ("schema.$defs.a.not", {"$defs": {"a": {"not": INT}}, "items": {"$ref": "#/$defs/a"}}),
    ("schema", object_of(["me"], me={"$ref": "#"})),
]


def exact(text):
    value = Decimal(text)
    return int(value) if value == int(value) else value


def date_time(value):
    if not isinstance(value, str):
        return True  # a format concerns strings
    try:
        return datetime.datetime.fromisoformat(value.replace("Z", "+00:00")).tzinfo is not None and "T" in value
    except ValueError:
        return False


def time_of_day(value):
    return date_time("2000-01-01T" + value) if isinstance(value, str) else True


def drawn(schemas, n=ANSWERS):
    lines = "".join(json.dumps(schema) + "\n" for schema in schemas)
    run = subprocess.run([os.environ["PAGEDKV_SCHEMA_ANSWERS"], str(n)], input=lines, capture_output=True, text=True,
                         timeout=300, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


class Schemas(unittest.TestCase):
    @unittest.skipIf(jsonschema is None, "run tools/setup --clients: jsonschema is not there")
    def test_every_answer_obeys(self):
        formats = jsonschema.FormatChecker(formats=("date", "uuid"))
        formats.checks("date-time")(date_time)
        formats.checks("time")(time_of_day)
        for schema, said in zip(OBEYED, drawn(OBEYED), strict=True):
            with self.subTest(schema=schema):
                self.assertIn("answers", said, said)
                self.assertGreaterEqual(len(said["answers"]), ANSWERS // 4, "answers that end")
                judge = jsonschema.Draft202012Validator(json.loads(json.dumps(schema), parse_float=exact),
                                                        format_checker=formats)
                for answer in said["answers"]:
                    value = json.loads(answer, parse_float=exact)
                    self.assertEqual([e.message for e in judge.iter_errors(value)], [], answer)

    def test_a_declared_name_is_written_once_and_in_its_place(self):
        schema = {"type": "object", "properties": {"a": INT, "ab": INT, "b": INT}, "additionalProperties": INT}
        [said] = drawn([schema], 300)
        for answer in said["answers"]:
            names = json.loads(answer, object_pairs_hook=lambda pairs: [name for name, _ in pairs])
            declared = [name for name in names if name in schema["properties"]]
            self.assertEqual(declared, sorted(set(declared)), answer)
            self.assertEqual(declared, names[:len(declared)], answer)

    def test_both_alternatives_are_drawn(self):
        [said] = drawn([{"oneOf": [CAT, DOG]}], 100)
        self.assertEqual({json.loads(answer)["kind"] for answer in said["answers"]}, {"cat", "dog"})

    def test_what_cannot_be_obeyed_is_refused_by_name(self):
        for (where, schema), said in zip(REFUSED, drawn([schema for _, schema in REFUSED]), strict=True):
            with self.subTest(schema=schema):
                self.assertEqual(said.get("refused"), where, said)

    def test_no_schema_takes_long(self):
        """Each is answered, or refused, within seconds."""
        chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}
        tree = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}
        pairs = {f"d{i}": object_of(["a", "b"], a={"$ref": f"#/$defs/d{i + 1}"}, b={"$ref": f"#/$defs/d{i + 1}"})
                 for i in range(1000)}
        long = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}
        schemas = [
            {"enum": [f"word {i}" for i in range(20000)]},
            {"enum": [f"word {i}" for i in range(20000)], "pattern": "7$"},
            {"allOf": [{"enum": list(range(20000))}, {"enum": list(range(10000, 30000))}]},
            {"$defs": {**chain, "d40": INT}, "$ref": "#/$defs/d0"},
            {"$defs": {**tree, "d40": INT}, "$ref": "#/$defs/d0"},
            {"$defs": {**pairs, "d1000": INT}, "$ref": "#/$defs/d0"},
            {"$defs": {**long, "d1500": INT}, "$ref": "#/$defs/d0"},
            {"type": "object", "properties": {f"p{i}": INT for i in range(5000)}},
            {"type": "object", "properties": {f"p{i}": {"minLength": i % 9, "type": "string"} for i in range(3000)}},
            {"type": "array", "prefixItems": [{"type": "string", "maxLength": 1000}] * 1000},
            {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 1000} for i in range(1000)}},
            {"oneOf": [{"enum": list(range(i, i + 2000))} for i in range(200)]},
            {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(100)], "type": "integer"},
            {"type": "string", "pattern": "^(((a{1,50}){1,50}){1,50}){1,50}$"},
            {"type": "string", "pattern": "[ab]*a[ab]{30}"},
            {"type": "string", "pattern": "(" * 5000},
            {"type": "object", "properties": {f"p{i}": {"type": "number", "multipleOf": 499, "minimum": i}
                                              for i in range(200)}},
        ]
        for schema in schemas:
            started = time.monotonic()
            [said] = drawn([schema], 0)
            with self.subTest(schema=json.dumps(schema)[:100]):
                self.assertNotIn("broken", said)
                self.assertLess(time.monotonic() - started, patient(10), said)


if __name__ == "__main__":
    unittest.main()
