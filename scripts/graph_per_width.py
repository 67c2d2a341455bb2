"""Edit llama.cpp so that a context keeps a graph for each of eight widths (decision 0047).

A context has two graphs, of passes with outputs and of those without, and CUDA's recording of a graph
belongs to the memory that the graph lies in. So each change of the width is recorded anew.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path("vendor", "llama.cpp", "src")  # in the source of llama-cpp-python
# In which file which lines, that must be there once, are replaced by what. Of passes of up to 64 rows, eight
# widths have graphs of their own. The one that was used longest ago makes room for another.
EDITS = (
    (
        "llama-context.h",
        "    llm_graph_result * get_gf_res_prev();\n",
        "    llm_graph_result * get_gf_res_prev(uint32_t n_tokens = 0);\n",
    ),
    (
        "llama-context.h",
        "    std::array<llm_graph_result_ptr, 2> gf_res_prev;\n",
        """\
    std::array<llm_graph_result_ptr, 10> gf_res_prev;
    std::array<uint64_t, 10> gf_res_key {}, gf_res_used {};
    uint64_t gf_res_uses = 0;
""",
    ),
    (
        "llama-context.cpp",
        "    auto * res = get_gf_res_prev();\n    auto * gf  = res->get_gf();\n",
        "    auto * res = get_gf_res_prev(ubatch.n_tokens);\n    auto * gf  = res->get_gf();\n",
    ),
    (
        "llama-context.cpp",
        """\
llm_graph_result * llama_context::get_gf_res_prev() {
    auto & res = gf_res_prev[n_outputs > 0];
""",
        """\
llm_graph_result * llama_context::get_gf_res_prev(uint32_t n_tokens) {
    size_t at = n_outputs > 0;
    if (n_tokens > 0 && n_tokens <= 64) {
        const uint64_t key = 2 * n_tokens + at;
        at = 2;
        for (size_t i = 3; i < gf_res_key.size() && gf_res_key[at] != key; ++i) {
            if (gf_res_key[i] == key || gf_res_used[i] < gf_res_used[at]) { at = i; }
        }
        gf_res_key[at] = key;
        gf_res_used[at] = ++gf_res_uses;
    }
    auto & res = gf_res_prev[at];
""",
    ),
)


def edit(source: Path) -> str | None:
    """Edit the source of llama-cpp-python in a folder. Return why it was left as it is, if it was."""
    texts = dict[Path, str]()
    for name, old, new in EDITS:
        path = source / FOLDER / name
        try:
            text = texts.get(path) or path.read_text(encoding="utf-8")
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if text.count(old) != 1:
            return f"{name} differs from what the edit was written for"
        texts[path] = text.replace(old, new)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return None
