/* Copy buttons copy what one types: no prompts, no outputs. What scrolls sideways can be scrolled by keyboard. */
(function () {
  "use strict";

  /* The lines of a session that a person typed; a block without prompts is taken whole. */
  function typed(text) {
    const lines = text.replace(/\s+$/, "").split("\n");
    if (lines.some((line) => /^>>>( |$)/.test(line)))
      return lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line)).map((line) => line.slice(4)).join("\n").replace(/\n+$/, "") + "\n";
    if (lines.some((line) => line.startsWith("$ "))) {
      let going = false;
      const kept = lines.filter((line) => {
        const mine = going || line.startsWith("$ ");
        going = mine && line.endsWith("\\");
        return mine;
      });
      return kept.map((line) => line.replace(/^\$ /, "")).join("\n") + "\n";
    }
    return lines.join("\n") + "\n";
  }

  window.HowSmoothTyped = typed;
  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("[data-clipboard-target]");
    const code = button && document.querySelector(button.dataset.clipboardTarget);
    if (code) button.setAttribute("data-clipboard-text", typed(code.textContent));
  }, true); // before the theme's own listener reads the attribute

  function scrollable() {
    for (const box of document.querySelectorAll(".md-typeset__scrollwrap, div.arithmatex"))
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
  }
  addEventListener("load", () => new ResizeObserver(scrollable).observe(document.body));
})();
