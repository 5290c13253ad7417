// Drag over a time line: the page of that part. Without this script the form below it does the same.
"use strict";
(() => {
  // Pictures are replaced on live pages, so the document listens.
  let drag = null;
  const begun = (svg) => {
    const number = (name) => Number(svg.dataset[name]);
    const [from, to, left, right] = [number("from"), number("to"), number("left"), number("right")];
    const width = svg.viewBox.baseVal.width;
    const brush = svg.querySelector(".brush");
    return {
      svg,
      // The part of the picture at a pointer, within the columns.
      part: (event) => {
        const box = svg.getBoundingClientRect();
        return Math.min(Math.max((event.clientX - box.left) / box.width, left), right);
      },
      seconds: (at) => from + ((at - left) / (right - left)) * (to - from),
      draw: (a, b) => {
        brush.setAttribute("x", Math.min(a, b) * width);
        brush.setAttribute("width", Math.abs(a - b) * width);
      },
    };
  };
  // As gctrace takes times.
  const text = (at) => (at < 1e-6 ? "0" : at.toFixed(6) + "s");
  const end = () => {
    delete drag.svg.dataset.drag;
    drag = null;
  };
  document.addEventListener("pointerdown", (event) => {
    // A finger scrolls: the time line may be wider than the screen.
    const svg = event.button === 0 && event.pointerType !== "touch" && event.target.closest(".timeline svg");
    if (!svg || !svg.querySelector(".brush") || !document.querySelector("form.part")) return;
    drag = begun(svg);
    drag.begin = drag.part(event);
    svg.dataset.drag = "";
    svg.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  document.addEventListener("pointermove", (event) => {
    if (drag) drag.draw(drag.begin, drag.part(event));
  });
  document.addEventListener("pointercancel", () => {
    if (!drag) return;
    drag.draw(0, 0);
    end();
  });
  document.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { svg, seconds, draw, begin, part } = drag;
    const [a, b] = [begin, part(event)].sort((x, y) => x - y);
    end();
    // A click is no choice.
    if ((b - a) * svg.getBoundingClientRect().width < 4) return draw(0, 0);
    const form = document.querySelector("form.part");
    form.elements.from.value = text(seconds(a));
    form.elements.to.value = text(seconds(b));
    form.submit();
  });
})();
