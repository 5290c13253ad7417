// Loads what stands now again each second, and the part below when that has changed. Without this script the page loads itself again.
"use strict";
(() => {
  const now = document.getElementById("live");
  const part = document.getElementById("part");
  const stale = document.getElementById("stale");
  const hold = document.getElementById("hold");
  if (!now || !part || !stale || !hold) return;
  const EVERY = 1000;
  const PART = 10000;
  let held = false;
  hold.hidden = false;
  hold.addEventListener("click", () => {
    held = !held;
    hold.setAttribute("aria-pressed", String(held));
    hold.textContent = held ? "Go on" : "Pause";
  });
  const page = async (path) => {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(60000) });
    if (!answer.ok) throw new Error(String(answer.status));
    return new DOMParser().parseFromString(await answer.text(), "text/html");
  };
  const idle = () => held || document.hidden || document.querySelector("svg[data-drag]") !== null;
  // Another state than its own is put into an element that stays, and so do scroll positions and the focus of what is wider than the
  // window: what is read aloud or watched is not lost.
  const take = (mine, other) => {
    for (const name of ["state", "moves", "keptFrom", "until", "dropped", "cycles", "majors"]) {
      if (other.dataset[name] === undefined) delete mine.dataset[name];
      else mine.dataset[name] = other.dataset[name];
    }
    const regions = () => [...mine.querySelectorAll(".wide")];
    const name = (one) => one.getAttribute("aria-label");
    const before = new Map(regions().map((one) => [name(one), [place(one), one === document.activeElement]]));
    mine.replaceChildren(...other.childNodes);
    for (const one of regions()) {
      const [at, focused] = before.get(name(one)) ?? [start(mine), false];
      one.scrollLeft = Math.min(at, one.scrollWidth);
      if (focused) one.focus({ preventScroll: true });
    }
  };
  // The end of what stands now moves on.
  const start = (mine) => (mine === now ? Infinity : 0);
  const place = (one) =>
    now.contains(one) && one.scrollLeft + one.clientWidth >= one.scrollWidth - 1 ? Infinity : one.scrollLeft;
  for (const one of now.querySelectorAll(".wide")) one.scrollLeft = one.scrollWidth;
  const standing = async () => {
    if (!idle()) {
      try {
        const fresh = (await page("live" + location.search)).getElementById("live");
        if (!fresh) throw new Error("no figures");
        // A drag may have begun meanwhile.
        if (!idle()) take(now, fresh);
        stale.hidden = true;
      } catch {
        now.dataset.state = "stale";
        stale.hidden = false;
      }
    }
    setTimeout(standing, EVERY);
  };
  // Somebody reads or types there.
  const used = () =>
    part.contains(document.activeElement) ||
    part.querySelector("iframe:hover") !== null ||
    (!getSelection().isCollapsed && part.contains(getSelection().anchorNode));
  const moved = async () => {
    let took = 0;
    if (part.dataset.moves === "yes" && stale.hidden && !idle() && !used()) {
      const begun = performance.now();
      try {
        const fresh = (await page("./" + location.search)).getElementById("part");
        if (fresh && !idle() && !used()) {
          const summary = (details) => details.querySelector("summary").textContent;
          const open = new Map([...part.querySelectorAll("details")].map((one) => [summary(one), one.open]));
          for (const one of fresh.querySelectorAll("details")) one.open = open.get(summary(one)) ?? one.open;
          take(part, fresh);
        }
      } catch {
        // What stands now tells it.
      }
      took = performance.now() - begun;
    }
    // What takes long is done less often.
    setTimeout(moved, Math.max(PART, 10 * took));
  };
  setTimeout(standing, EVERY);
  setTimeout(moved, PART);
})();
