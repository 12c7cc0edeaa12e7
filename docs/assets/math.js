/* Formulas: what Markdown marked as mathematics is set by KaTeX, from files of this site. */
document.addEventListener("DOMContentLoaded", () => {
  for (const node of document.querySelectorAll(".arithmatex")) {
    const source = node.textContent.trim(), display = node.tagName === "DIV";
    katex.render(source.replace(/^\\[([]|\\[)\]]$/g, ""), node, { displayMode: display, throwOnError: true, strict: "error" });
  }
});
