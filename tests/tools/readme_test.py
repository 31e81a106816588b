"""What the documents show is what the tree holds."""
import re
import textwrap
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fences(document, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


def is_passage(passage, text):
    """True if the lines of `passage` follow each other in `text`, apart from an indentation common to all of them."""
    wanted, lines = textwrap.dedent(passage).splitlines(), text.splitlines()
    return any(textwrap.dedent("\n".join(lines[at:at + len(wanted)])).splitlines() == wanted
               for at in range(len(lines) - len(wanted) + 1)) and passage.strip() != ""


class Documents(unittest.TestCase):
    def assert_shown(self, document, language, sources):
        texts = [source.read_text() for source in sources]
        shown = fences(ROOT / document, language)
        self.assertTrue(shown)
        for passage in shown:
            with self.subTest(document=document, begins=passage.splitlines()[0]):
                self.assertTrue(any(is_passage(passage, text) for text in texts))

    def test_a_passage_is_found_at_another_indentation_and_not_with_a_change(self):
        text = "int f() {\n  if (x) {\n    return 1;\n  }\n\n  return 2;\n}\n"
        self.assertTrue(is_passage("if (x) {\n  return 1;\n}\n\nreturn 2;\n", text))
        for other in ["", "if (x) {\nreturn 1;\n}\n", "if (x) {\n  return 1;\n}\nreturn 2;\n", "return 3;\n", "return\n"]:
            self.assertFalse(is_passage(other, text), other)

    def test_the_cpp_of_readme_and_library_guide_is_of_the_examples(self):
        # Every .cc there is built and run by ctest (examples/CMakeLists.txt).
        examples = sorted((ROOT / "examples").glob("*.cc"))
        self.assert_shown("README.md", "cpp", examples)
        self.assert_shown("docs/library.md", "cpp", examples)

    def test_the_cmake_of_the_library_guide_is_of_the_consumer_that_is_tested(self):
        self.assert_shown("docs/library.md", "cmake", [ROOT / "tests/install/consumer/CMakeLists.txt"])

    def test_every_relative_link_of_every_document_leads_to_a_file(self):
        documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        self.assertGreater(len(documents), 3)
        for document in documents:
            prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src(?:set)?=\"([^\"]+)\"", prose):
                link = "".join(target)
                if "://" in link or link.startswith("mailto:"):
                    continue
                with self.subTest(document=str(document.relative_to(ROOT)), link=link):
                    self.assertTrue((document.parent / link).exists())


if __name__ == "__main__":
    unittest.main()
