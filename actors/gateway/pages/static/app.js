"use strict";
// On every page: the theme, questions before what cannot be undone, tables that keep up to date.
(() => {
  const root = document.documentElement;

  const toggle = document.querySelector("[data-theme-toggle]");
  if (toggle) {
    toggle.addEventListener("click", () => {
      const dark = matchMedia("(prefers-color-scheme: dark)").matches;
      const now = root.dataset.theme === "auto" ? (dark ? "dark" : "light") : root.dataset.theme;
      root.dataset.theme = now === "dark" ? "light" : "dark";
      document.cookie = `theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
      document.dispatchEvent(new Event("themechange"));
    });
  }

  document.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });

  document.addEventListener("change", (event) => {
    if (!event.target.matches("[data-all]")) return;
    for (const one of event.target.form.querySelectorAll("input[name=run]")) one.checked = event.target.checked;
  });

  // Arrow keys, j and k lead to the step before and after this one; without steps, or beyond the
  // last, and always with Shift, to the page that the links `prev` and `next` name.
  const steps = [...document.querySelectorAll("[data-steps] .steps-list > .step")];
  let current = steps.findIndex((one) => one.hasAttribute("aria-current") || `#${one.id}` === location.hash);
  const walk = (by) => {
    const next = steps[current < 0 && by < 0 ? -1 : current + by];
    if (!next) return false;
    steps[current]?.removeAttribute("aria-current");
    current += by;
    next.setAttribute("aria-current", "step");
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "start" });
    history.replaceState(null, "", next.querySelector(".step-number").href);
    return true;
  };
  document.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, k: -1, ArrowRight: 1, j: 1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.target.closest("input, textarea, select, .u-over")) return;
    if (!event.shiftKey && walk(by)) return event.preventDefault();
    const more = !event.shiftKey && document.querySelector(by > 0 ? "[data-step-after]" : "[data-step-before]");
    const other = event.key.length > 1 && document.querySelector(`main a[rel=${by > 0 ? "next" : "prev"}]`);
    (more || other || null)?.click();
  });

  for (const place of document.querySelectorAll("[data-refresh]")) {
    const url = place.dataset.refresh + (place.dataset.refresh.includes("?") ? "&" : "?") + "part=rows";
    const parsed = document.createElement("template");
    let shown = place.innerHTML.trim();
    const refresh = async () => {
      const focused = place.contains(document.activeElement) ? document.activeElement : null;
      const busy = focused?.matches("input:not([type=checkbox]), button") || (!getSelection().isCollapsed && place.contains(getSelection().anchorNode));
      if (document.hidden || busy) return;
      const reply = await fetch(url, { headers: { accept: "text/html" } });
      if (reply.redirected || reply.status === 401) return location.reload();
      if (!reply.ok) return;
      parsed.innerHTML = await reply.text();
      const html = parsed.innerHTML.trim();
      if (html !== shown) {
        const chosen = new Set([...place.querySelectorAll("input:checked")].map((one) => one.value));
        const left = [...place.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
        const name = focused && ["href", "value"].find((key) => focused.hasAttribute(key));
        place.innerHTML = html;
        for (const one of place.querySelectorAll("input[type=checkbox]")) one.checked = chosen.has(one.value);
        place.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = left[at] || 0; });
        if (name) place.querySelector(`${focused.localName}[${name}="${CSS.escape(focused.getAttribute(name))}"]`)?.focus({ preventScroll: true });
      }
      shown = html;
    };
    const again = () => setTimeout(() => refresh().catch(() => { /* the gateway is away */ }).finally(again), Number(place.dataset.every) * 1000);
    again();
  }

  const filter = document.querySelector("[data-log-filter]");
  const log = document.querySelector("[data-log]");
  if (log) {
    log.scrollTop = log.scrollHeight;
    const apply = () => {
      const words = (filter.value || "").toLowerCase();
      for (const line of log.children) line.hidden = !line.textContent.toLowerCase().includes(words);
    };
    filter.addEventListener("input", apply);
    document.addEventListener("logchange", apply);
  }
})();
