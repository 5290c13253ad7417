// Drag over the time line: the page of that part. Without this script the form below it does the same.
"use strict";
(() => {
  const svg = document.querySelector(".timeline svg");
  const form = document.querySelector("form.part");
  const brush = svg && svg.querySelector(".brush");
  if (!svg || !form || !brush) return;
  const number = (name) => Number(svg.dataset[name]);
  const [from, to, left, right] = [number("from"), number("to"), number("left"), number("right")];
  const width = svg.viewBox.baseVal.width;
  // The part of the picture at a pointer, within the columns.
  const part = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) / box.width, left), right);
  };
  const seconds = (at) => from + ((at - left) / (right - left)) * (to - from);
  // As gctrace takes times.
  const text = (at) => (at < 1e-6 ? "0" : at.toFixed(6) + "s");
  let begin = null;
  const draw = (a, b) => {
    brush.setAttribute("x", Math.min(a, b) * width);
    brush.setAttribute("width", Math.abs(a - b) * width);
  };
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    begin = part(event);
    svg.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  svg.addEventListener("pointermove", (event) => {
    if (begin !== null) draw(begin, part(event));
  });
  svg.addEventListener("pointercancel", () => {
    begin = null;
    draw(0, 0);
  });
  svg.addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const [a, b] = [begin, part(event)].sort((x, y) => x - y);
    begin = null;
    // A click is no choice.
    if ((b - a) * svg.getBoundingClientRect().width < 4) return draw(0, 0);
    form.elements.from.value = text(seconds(a));
    form.elements.to.value = text(seconds(b));
    form.submit();
  });
})();
