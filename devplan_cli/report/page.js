"use strict";
// Zoom and move the plots, show what is pointed at, sort tables. The page is complete without any of it.

const tip = document.createElement("div");
tip.id = "tip-box";
document.body.append(tip);

function showTip(event) {
  const title = event.target.querySelector && event.target.querySelector(":scope > title");
  const words = title ? title.textContent : event.target.dataset && event.target.dataset.tip;
  tip.style.display = words ? "block" : "none";
  if (!words) return;
  tip.textContent = words;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

function zoomable(svg) {
  const whole = svg.viewBox.baseVal;
  const start = { x: whole.x, y: whole.y, width: whole.width, height: whole.height };
  let view = { ...start };
  let grip = null;
  const apply = () => svg.setAttribute("viewBox", `${view.x} ${view.y} ${view.width} ${view.height}`);
  const scale = () => view.width / svg.clientWidth;
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const factor = event.deltaY < 0 ? 0.8 : 1.25;
    const width = Math.min(start.width, view.width * factor);
    const height = width * start.height / start.width;
    const box = svg.getBoundingClientRect();
    const fx = (event.clientX - box.left) / box.width, fy = (event.clientY - box.top) / box.height;
    view = { x: view.x + (view.width - width) * fx, y: view.y + (view.height - height) * fy, width, height };
    apply();
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => { grip = event; svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointerup", () => { grip = null; });
  svg.addEventListener("pointermove", (event) => {
    if (!grip) return;
    view.x -= (event.clientX - grip.clientX) * scale();
    view.y -= (event.clientY - grip.clientY) * scale();
    grip = event;
    apply();
  });
  svg.addEventListener("dblclick", () => { view = { ...start }; apply(); });
}

function sortable(table) {
  table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const rows = [...table.tBodies[0].rows];
    const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent;
    const ascending = head.dataset.order !== "up";
    table.querySelectorAll("th").forEach((other) => delete other.dataset.order);
    head.dataset.order = ascending ? "up" : "down";
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      const order = head.classList.contains("n") ? Number(x) - Number(y) : String(x).localeCompare(String(y));
      return ascending ? order : -order;
    });
    table.tBodies[0].append(...rows);
  }));
}

document.addEventListener("pointermove", showTip);
document.querySelectorAll(".plot svg").forEach(zoomable);
document.querySelectorAll("table").forEach(sortable);
