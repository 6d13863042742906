"use strict";
// Talks with a served model by the gateway's own /v1/chat/completions, as any other client does. Each
// answer shows its tokens, coloured by log-prob as on the page of an episode. Texts of models are put
// into the page as text only.
(() => {
  const root = document.getElementById("playground");
  const find = (name) => root.querySelector(name);
  const settings = find("[data-settings]"), chat = find("[data-chat]"), say = find("[data-say]");
  const [stop, again, note, offers, serving] = ["[data-stop]", "[data-again]", "[data-note]", "[data-offers]", "[data-serving]"].map(find);
  const LEVELS = [-0.05, -0.3, -1, -2, -4];
  const messages = []; // what is sent: role and content
  let running = null;

  const element = (tag, className, text = "") => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.textContent = text;
    return made;
  };

  const level = (logprob) => {
    const found = LEVELS.findIndex((bound) => logprob >= bound);
    return found < 0 ? LEVELS.length : found;
  };

  // ---- which models there are; one that is just being started is waited for
  const listed = async () => {
    const wanted = settings.model.value || root.dataset.model;
    let there = [], served = [];
    try {
      const reply = await fetch("/v1/models");
      if (reply.status === 401) return location.reload();
      if (reply.ok) served = (await reply.json()).data;
      there = [...new Set(served.map((one) => one.id))];
    } catch { /* the gateway is away; the next round tries again */ }
    const names = wanted && !there.includes(wanted) ? [wanted, ...there] : there;
    const shown = [...settings.model.options].map((one) => one.value);
    if (names.join("\n") !== shown.join("\n")) {
      settings.model.replaceChildren(...names.map((name) => new Option(name, name)));
      if (wanted) settings.model.value = wanted;
    }
    const waits = wanted && !there.includes(wanted);
    note.replaceChildren(waits ? `${wanted} does not answer yet. ` : there.length ? "Every answer shows its tokens." : "");
    offers.hidden = Boolean(names.length);
    for (const part of [settings, say, find("[data-system-message]")]) part.hidden = !names.length;
    const own = served.find((one) => one.id === (settings.model.value || wanted));
    const job = own ? own.owned_by !== "tinker" && own.job : waits && root.dataset.job;
    serving.hidden = !job;
    if (job) {
      serving.action = `/jobs/${encodeURIComponent(job)}/stop`;
      serving.firstChild.textContent = `${own?.name || wanted} keeps its slot of the pool until it is stopped.`;
    }
    if (waits && root.dataset.job) {
      const link = element("a", "", "See what it waits for");
      link.href = `/jobs/${encodeURIComponent(root.dataset.job)}`;
      note.append(link);
    }
    say.querySelector("[type=submit]").disabled = Boolean(running) || waits || !names.length;
    setTimeout(listed, waits ? 1000 : 5000);
  };

  // ---- the conversation
  const article = (role, text) => {
    const made = element("article", `message m-${role}`);
    const head = element("header", "");
    head.append(element("b", "", role), element("span", "dim"));
    made.append(head, element("pre", "", text));
    chat.append(made);
    return made;
  };

  const showTokens = (place, tokens) => {
    for (const one of tokens) {
      const made = element("span", `tok made l${level(one.logprob)}`, one.token);
      made.title = `log-prob ${one.logprob.toFixed(3)}`;
      place.append(made);
    }
  };

  const parts = async function* (reply) {
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const text = event.replace(/^data: ?/, "");
        if (text === "[DONE]") return;
        yield JSON.parse(text);
      }
    }
  };

  const answer = async () => {
    const made = article("assistant", "");
    const [words, told] = [made.querySelector("pre"), made.querySelector("header .dim")];
    const tokens = element("div", "tokens");
    const details = element("details", "");
    details.open = true;
    details.append(element("summary", "dim", "Tokens"), tokens);
    made.append(details);
    const began = performance.now();
    const told_of = { model: settings.model.value, tokens: 0, sum: 0, first: 0, finish: "" };
    const tell = () => {
      const s = (performance.now() - began) / 1000;
      const mean = told_of.tokens ? (told_of.sum / told_of.tokens).toFixed(3) : "–";
      told.textContent = `${told_of.model} · ${told_of.tokens} tokens · first after ${told_of.first.toFixed(2)} s, ${(told_of.tokens / s).toFixed(0)}/s · log-prob ${mean}${told_of.finish === "length" ? " · cut by its limit" : ""}`;
    };
    running = new AbortController();
    busy();
    let text = "";
    try {
      const system = find("[data-system]").value.trim();
      const reply = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        signal: running.signal,
        body: JSON.stringify({
          model: told_of.model,
          messages: system ? [{ role: "system", content: system }, ...messages] : messages,
          temperature: Number(settings.temperature.value),
          max_tokens: Number(settings.max_tokens.value) || undefined,
          stream: true,
          logprobs: true,
        }),
      });
      if (!reply.ok) throw new Error((await reply.json()).error.message);
      for await (const part of parts(reply)) {
        if (part.error) throw new Error(part.error.message);
        const choice = part.choices[0];
        if (!choice) continue;
        if (part.model) told_of.model = part.model;
        text += choice.delta.content || "";
        for (const call of choice.delta.tool_calls || []) {
          made.insertBefore(element("pre", "call", `${call.function.name}(${call.function.arguments})`), details);
        }
        const news = choice.logprobs?.content || [];
        if (news.length && !told_of.tokens) told_of.first = (performance.now() - began) / 1000;
        told_of.tokens += news.length;
        told_of.sum += news.reduce((sum, one) => sum + one.logprob, 0);
        told_of.finish = choice.finish_reason || told_of.finish;
        words.textContent = text;
        showTokens(tokens, news);
        tell();
      }
    } catch (error) {
      if (error.name !== "AbortError") made.append(element("p", "problem", error.message));
    }
    running = null;
    if (text || told_of.tokens) messages.push({ role: "assistant", content: text });
    busy();
  };

  const busy = () => {
    stop.hidden = !running;
    again.hidden = Boolean(running) || messages.at(-1)?.role !== "assistant";
    say.querySelector("[type=submit]").disabled = Boolean(running);
  };

  say.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    const text = say.text.value;
    if (messages.at(-1)?.role === "user") messages.pop(); // the last one had no answer
    messages.push({ role: "user", content: text });
    article("user", text);
    say.text.value = "";
    answer();
  });
  say.text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) say.requestSubmit();
  });
  stop.addEventListener("click", () => running?.abort());
  again.addEventListener("click", () => {
    messages.pop();
    answer();
  });
  find("[data-clear]").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    chat.replaceChildren();
    busy();
  });
  find("[data-save]").addEventListener("click", () => {
    const link = element("a", "");
    const told = { model: settings.model.value, messages };
    link.href = URL.createObjectURL(new Blob([JSON.stringify(told, null, 2)], { type: "application/json" }));
    link.download = "conversation.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });
  listed();
})();
