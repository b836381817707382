"use strict";
// One answer: its reward, its tokens, and what lies under the pointer.

const shading = { by: "none" };
const known = (value) => value !== null && value !== undefined;
const signed = (value, digits) => value === 0 ? "0" : `${value < 0 ? "−" : "+"}${Math.abs(value).toPrecision(digits)}`;
const minus = (words) => words.replace("-", "−");
const short = (value) => (known(value) ? minus(String(Number(value.toPrecision(4)))) : "not finite");
const small = (value) => (value && Math.abs(value) < 1e-3 ? minus(value.toExponential(2)) : signed(value, 3));
const percent = (logprob) => {
  const part = Math.exp(logprob) * 100;
  return `${part >= 99.995 ? "100" : part >= 10 ? part.toFixed(2) : part >= 1e-3 ? part.toPrecision(3) : minus(part.toExponential(1))}%`;
};

// How strongly a token is shaded, 0 to 1. A mismatch grows as its root: 0.01 nats can be seen, 1 nat is full.
function strength(answer, i) {
  if (shading.by === "probability" && known(answer.logprobs[i])) return 1 - Math.exp(answer.logprobs[i]);
  if (shading.by === "mismatch" && known(answer.differences[i])) return Math.min(1, Math.sqrt(Math.abs(answer.differences[i])));
  return 0;
}

class Answer {
  constructor(answer, label, group) {
    this.answer = answer;
    this.given = new Set(answer.given);
    this.at = null;
    this.tokens = answer.pieces.map((piece, i) => this.token(piece, i));
    const left = answer.length - answer.pieces.length;
    this.text = element("div", {
      class: "text", tabindex: 0, role: "application", "aria-label": `${label}, answer ${answer.sample}`,
      onkeydown: (event) => this.key(event), onblur: () => this.hide(), onscroll: () => this.hide(),
      onpointerover: (event) => this.show(this.tokens.indexOf(event.target)), onpointerleave: () => this.hide(),
    }, ...this.tokens, answer.logprobs.length && left > 0 ? element("span", { class: "given" }, ` … ${number(left)} more tokens`) : "");
    this.tip = element("div", { class: "tip", hidden: "" });
    this.card = element("article", { class: group.used ? "" : "unused" }, this.head(label), this.facts(), this.text, this.tip);
    this.shade();
  }

  head(label) {
    const { reward } = this.answer, part = known(reward) && RANGE[1] > RANGE[0] ? (reward - RANGE[0]) / (RANGE[1] - RANGE[0]) : 0;
    return element("h3", {}, element("span", {}, label), element("b", {}, short(reward)),
      element("span", { class: "meter", "aria-hidden": "true" }, element("i", { style: `width:${part * 100}%` })));
  }

  facts() {
    const { answer } = this, parts = Object.entries(answer.parts).map(([name, value]) => `${name} ${short(value)}`);
    const chips = parts.map((words) => element("span", { class: "chip" }, words));
    const said = [`answer ${answer.sample}`, `${number(answer.length)} token${answer.length === 1 ? "" : "s"}`];
    if (known(answer.advantage)) said.push(`advantage ${signed(answer.advantage, 3)}`);
    if (!answer.finished) chips.push(element("span", { class: "chip mark", title: "It did not end within the largest number of tokens." }, "cut"));
    return element("p", { class: "chips" }, ...chips, element("span", {}, said.join(" · ")));
  }

  token(piece, i) {
    const kind = piece === "" ? "empty" : /^[\r\n]+$/.test(piece) ? "break" : "";
    return element("span", { class: `${kind} ${this.given.has(i) ? "given" : ""}`.trim() }, piece);
  }

  shade() {
    this.text.style.setProperty("--shade", `var(--shade-${shading.by === "mismatch" ? "mismatch" : "probability"})`);
    this.tokens.forEach((token, i) => {
      const value = this.given.has(i) ? 0 : strength(this.answer, i);
      if (value > 0.005) token.style.setProperty("--a", value.toFixed(3));
      else token.style.removeProperty("--a");
    });
  }

  key(event) {
    const last = this.tokens.length - 1, here = this.at ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const to = { ArrowRight: Math.min(last, here + 1), ArrowLeft: Math.max(0, here - 1), Home: 0, End: last }[event.key];
    if (event.key === "Escape") return this.hide();
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.tokens[to].scrollIntoView({ block: "nearest" });
    this.show(to);
    $("say").textContent = [...this.tip.querySelectorAll("p, tr")].map((each) => each.textContent).join("; ");
  }

  hide() {
    if (this.at !== null) this.tokens[this.at].classList.remove("under");
    this.at = null;
    this.tip.hidden = true;
  }

  show(i) {
    this.hide();
    const { answer } = this, logprob = answer.logprobs[i];
    if (i < 0 || !answer.logprobs.length) return;
    this.at = i;
    this.tokens[i].classList.add("under");
    const difference = answer.differences[i], row = (name, ...words) =>
      element("tr", {}, element("td", {}, name), ...words.map((each) => element("td", {}, each)));
    const rows = this.given.has(i) ? [row("given by the environment")] : [row("engine", ...this.probability(logprob))];
    if (known(difference) && !this.given.has(i)) {
      rows.push(row("trainer", ...this.probability(logprob + difference)), row("difference", "", small(difference)));
    }
    this.tip.replaceChildren(
      element("p", {}, element("code", {}, element("b", {}, JSON.stringify(answer.pieces[i]))),
        element("span", { class: "dim" }, ` token ${number(i + 1)} of ${number(answer.length)}`)),
      element("table", {}, ...rows));
    this.tip.hidden = false;
    const token = this.tokens[i].getClientRects()[0] ?? this.tokens[i].getBoundingClientRect(), box = this.card.getBoundingClientRect();
    const left = Math.max(4, Math.min(token.left - box.left, box.width - this.tip.offsetWidth - 6));
    this.tip.style.transform = `translate(${left}px, ${token.bottom - box.top + 5}px)`;
  }

  probability(logprob) {
    return known(logprob) ? [element("b", {}, percent(logprob)), `log ${minus(logprob.toFixed(4))}`] : [element("b", {}, "0%"), "log −∞"];
  }
}
