// The demo in Firefox: each tab opens, the guide's first step is seen in the pool, and nothing is an error.
//
//   make test-firefox      starts the demo and runs this with its address and the folder that has puppeteer-core
import { createRequire } from "node:module";
import process from "node:process";

const [url, packages, executablePath] = process.argv.slice(2);
const puppeteer = createRequire(`${packages}/`)("puppeteer-core");
const TABS = ["chat", "samples", "pool", "pressure", "memory", "plots", "step"];

const browser = await puppeteer.launch({ browser: "firefox", executablePath, headless: true });
try {
  const page = await browser.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(`${error}`));
  page.on("console", (line) => line.type() === "error" && errors.push(line.text()));
  await page.setViewport({ width: 1300, height: 900 });
  await page.goto(url);

  const see = (condition, what) =>
    page.waitForFunction(condition, { timeout: 60_000 }).catch(() => Promise.reject(new Error(`not seen: ${what}`)));
  await (await page.waitForSelector("#guide-1", { timeout: 60_000 })).click();
  await see(`document.querySelectorAll("#pool .kv-owners button").length >= 2`, "two requests in the pool");
  await see(`document.querySelector("#chat .bot")?.innerText.includes("ended by")`, "a reply that ends");
  await see(`document.querySelector("#pool .kv-scrubber").max > 20`, "steps to go back to");
  await page.focus("#pool .kv-scrubber");
  for (let step = 0; step < 20; step += 1) await page.keyboard.press("ArrowLeft");
  await see(`document.querySelector("#pool .kv-timeline").innerText.includes("as of step")`, "the pool as of an earlier step");
  await page.click("#pool .kv-live");
  for (const tab of TABS) {
    await page.click(`#tab-${tab}-button`);
    await see(`document.querySelector("#tab-${tab}-button").getAttribute("aria-selected") === "true"`, `the tab ${tab}`);
  }
  await page.click("#tab-samples-button");
  await (await page.waitForSelector("#samples-run", { visible: true })).click();
  await see(`document.querySelectorAll("#samples-cards article").length === 4`, "four samples");
  if (errors.length) throw new Error(`Firefox complained:\n${errors.join("\n")}`);
  console.log(`${await browser.version()}: the demo works`);
} finally {
  await browser.close();
}
