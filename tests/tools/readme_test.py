"""What the documents show is what the tree holds."""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def marked_region(file):
    return re.search(r"^// \[readme\]\n(.*?)^// \[/readme\]$", file.read_text(), re.DOTALL | re.MULTILINE)[1]


class Documents(unittest.TestCase):
    def test_the_readme_shows_the_marked_region_of_the_example(self):
        blocks = re.findall(r"^```cpp\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
        self.assertEqual(blocks[0], marked_region(ROOT / "examples/engine_step.cc"))

    def test_every_relative_link_of_every_document_leads_to_a_file(self):
        documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        self.assertGreater(len(documents), 3)
        for document in documents:
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src(?:set)?=\"([^\"]+)\"", document.read_text()):
                link = "".join(target)
                if "://" in link or link.startswith("mailto:"):
                    continue
                with self.subTest(document=str(document.relative_to(ROOT)), link=link):
                    self.assertTrue((document.parent / link).exists())


if __name__ == "__main__":
    unittest.main()
