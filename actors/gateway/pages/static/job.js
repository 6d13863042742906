"use strict";
// A job's page keeps up to date: state, actors, events and log lines come as server-sent events.
// The stream is closed while nobody looks, because a browser has few connections to one server.
(() => {
  const page = document.getElementById("job");
  const url = `/api/v1/jobs/${encodeURIComponent(page.dataset.job)}/stream`;
  const of = page.dataset.tab === "logs" ? "log" : "feed";
  const events = document.querySelector("[data-events]");
  const log = document.querySelector("[data-log]");
  let next = Number(page.dataset.seq || 0) + 1;
  let source = null;

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.textContent = text;
    return made;
  };

  const showState = (told) => {
    const fresh = document.createElement("template");
    fresh.innerHTML = told.html;
    for (const part of fresh.content.querySelectorAll("[data-part]")) {
      const old = page.querySelector(`[data-part="${part.dataset.part}"]`);
      if (old && old.innerHTML !== part.innerHTML && !old.contains(document.activeElement)) {
        const left = old.scrollLeft;
        old.replaceWith(part);
        part.scrollLeft = left;
      }
    }
  };

  const showEvent = (told) => {
    if (!events || told.kind === "bottleneck") return;
    const item = element("li", `k-${told.kind.replace(/[^a-z_]/g, "")}`, "");
    const clock = new Date(told.time * 1000).toISOString();
    const time = element("time", "", clock.slice(11, 19));
    time.title = `${clock.slice(0, 19).replace("T", " ")} UTC`;
    item.append(time, element("b", "", told.kind.replaceAll("_", " ")));
    item.append(element("span", "from", told.source), element("span", "text", told.message));
    events.querySelector(":scope > .dim")?.remove();
    events.prepend(item);
    while (events.children.length > Number(events.dataset.most)) events.lastElementChild.remove();
  };

  const showLines = (lines) => {
    if (!log) return;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    for (const line of lines) {
      if (log.dataset.actor && line.actor !== log.dataset.actor) continue;
      const item = element("li", `lv-${line.level.replace(/[^a-z]/g, "")}`, "");
      item.append(element("b", "", line.actor), element("span", "", line.text));
      log.querySelector(":scope > .dim")?.remove();
      log.append(item);
    }
    while (log.children.length > 3000) log.firstElementChild.remove();
    document.dispatchEvent(new Event("logchange"));
    if (atEnd) log.scrollTop = log.scrollHeight;
  };

  const trouble = (text) => {
    let bar = document.querySelector(".offline");
    if (!text) return bar?.remove();
    if (!bar) document.body.append((bar = element("div", "offline", "")));
    bar.textContent = text;
  };

  const open = () => {
    if (source) return;
    source = new EventSource(`${url}?of=${of}&from=${next}`);
    const on = (name, take) => source.addEventListener(name, (message) => {
      trouble("");
      if (message.lastEventId) next = Number(message.lastEventId) + 1;
      take(JSON.parse(message.data));
    });
    on("job", showState);
    on("event", showEvent);
    on("log", showLines);
    on("metric", (told) => document.dispatchEvent(new CustomEvent("metric", { detail: told })));
    on("reload", () => location.reload());
    source.addEventListener("trouble", (message) => trouble(JSON.parse(message.data).message));
    source.addEventListener("open", () => trouble(""));
    source.addEventListener("error", () => {
      trouble("The gateway does not answer; trying again …");
      if (source && source.readyState === EventSource.CLOSED) { close(); setTimeout(open, 3000); }
    });
  };
  const close = () => { source?.close(); source = null; };

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  if (!document.hidden) open();
})();
